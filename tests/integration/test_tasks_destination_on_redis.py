"""The queue to which a message is requeued on a Redis broker."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.app.task import Context
from kombu import Exchange, Queue

from django_dlock.celery.publishing import destination
from testproject.servers import RedisServer


def test_a_message_of_a_fanout_exchange_on_redis_is_requeued_to_its_own_queue(
    own_redis: RedisServer,
) -> None:
    """Published to the exchange again, the message would also reach every other queue."""
    app = Celery("pubsub", broker=own_redis.url, set_as_current=False)
    exchange = Exchange("news", "fanout")
    names = ["news.a", "news.b"]
    app.conf.task_queues = [Queue(name, exchange) for name in names]
    info = {"exchange": exchange.name, "routing_key": ""}
    with app.connection_for_write() as connection:
        for count, name in enumerate(names):
            app.amqp.queues[name](connection.default_channel).declare()
            if count == 0:
                to = destination.route(app, Context(delivery_info=info), connection, 1)
                assert (to["exchange"], to["countdown"]) == (exchange.name, 1)
        with pytest.raises(destination.CannotRequeue, match="2 queues"):
            destination.route(app, Context(delivery_info=info), connection, 1)
