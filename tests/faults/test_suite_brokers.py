"""What the fault suite knows of messages on their way."""

from __future__ import annotations

import redis

from tests.faults.suite.brokers import RedisBroker


def test_a_message_that_nobody_wrote_down_is_missing():
    with RedisBroker() as broker, redis.Redis.from_url(broker.url) as client:
        client.lpush("celery", "one", "two", "three")
        broker.calibrate()
        assert broker.missing() == 0
        # As a worker takes it, and writes down that it is not acknowledged.
        client.rpop("celery")
        client.hset("unacked", "tag", "one")
        assert broker.missing() == 0
        client.rpop("celery")
        assert broker.missing() == 1
        broker.calibrate()
        assert broker.missing() == 0
