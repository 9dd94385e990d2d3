"""How the fault suite finds messages between queue and worker."""

from __future__ import annotations

import redis

from tests.faults.suite.brokers import RedisBroker


def test_a_message_without_an_entry_for_a_worker_is_missing():
    with RedisBroker() as broker, redis.Redis.from_url(broker.url) as client:
        client.lpush("celery", "one", "two", "three")
        broker.calibrate()
        assert broker.missing() == 0
        # As a worker does: take the message and note it as unacknowledged.
        client.rpop("celery")
        client.hset("unacked", "tag", "one")
        assert broker.missing() == 0
        client.rpop("celery")
        assert broker.missing() == 1
        broker.calibrate()
        assert broker.missing() == 0
