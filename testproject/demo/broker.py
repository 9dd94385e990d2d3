"""The broker as the demonstration looks at it: is it empty, and what may be redelivered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django_dlock import clock

__all__ = ["Broker"]

EVERY = 0.5


class Broker:
    """Redis as Celery uses it."""

    def __init__(self, queues: Sequence[str]) -> None:
        from testproject.celery import app

        self._queues = queues
        self._connection: Any = app.connection_for_read()
        self._channel: Any = self._connection.default_channel
        self._next = 0.0

    def is_empty(self) -> bool:
        """Whether no message waits in a queue, and none is with a worker."""
        with self._channel.conn_or_acquire() as client, client.pipeline() as pipe:
            pipe.hlen(self._channel.unacked_key)
            for queue in self._queues:
                pipe.llen(queue)
            return not any(pipe.execute())

    def restore_visible(self) -> None:
        """Redeliver what has been with a worker for longer than the visibility timeout.

        Workers do the same by the same call, but look every few minutes only, and not all
        versions of kombu let that be changed.
        """
        if clock.now() >= self._next:
            self._next = clock.now() + EVERY
            self._channel.qos.restore_visible(num=100, interval=1)

    def close(self) -> None:
        self._connection.release()
