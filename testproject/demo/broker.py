"""What the demonstration asks the broker: how many messages wait, and which are redelivered."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from django_dlock import clock

EVERY = 0.5


class Broker(Protocol):
    """What the demonstration needs to know about a broker."""

    def messages(self, unfinished: int) -> int:
        """The number of messages in queues and at workers.

        Args:
            unfinished: How many messages were published and are not reported as done.
        """

    def restore_visible(self) -> None:
        """Redeliver messages whose visibility timeout has passed."""

    def resend(self, worker: str) -> int:
        """Redeliver the messages of a killed worker; returns their number."""

    def close(self) -> None: ...


class RedisBroker:
    """Redis as Celery uses it: unacknowledged messages are redelivered automatically."""

    def __init__(self, queues: Sequence[str]) -> None:
        from testproject.celery import app

        self._queues = queues
        self._connection: Any = app.connection_for_read()
        self._channel: Any = self._connection.default_channel
        self._next = 0.0

    def messages(self, unfinished: int) -> int:
        with self._channel.conn_or_acquire() as client, client.pipeline() as pipe:
            pipe.hlen(self._channel.unacked_key)
            for queue in self._queues:
                pipe.llen(queue)
            return sum(pipe.execute())

    def restore_visible(self) -> None:
        """Redeliver what has been with a worker for longer than the visibility timeout.

        Workers make the same call, but only every few minutes, and not all versions of kombu can
        change that.
        """
        if clock.now() >= self._next:
            self._next = clock.now() + EVERY
            self._channel.qos.restore_visible(num=100, interval=1)

    def resend(self, worker: str) -> int:
        """Do nothing: the broker redelivers after the visibility timeout."""
        return 0

    def close(self) -> None:
        self._connection.release()


class FileBroker:
    """Kombu's file broker, which does not redeliver messages.

    It keeps the files of delivered messages, but not whether the worker had finished them.

    Args:
        queue: The folder of waiting messages.
        delivered: The folder of delivered messages, with a subfolder for each worker.
    """

    def __init__(self, queues: Sequence[str], queue: Path, delivered: Path) -> None:
        self._queues, self._folder, self._delivered = queues, queue, delivered

    def messages(self, unfinished: int) -> int:
        waiting = (len(list(self._folder.glob(f"*.{queue}.msg"))) for queue in self._queues)
        return max(unfinished, sum(waiting))

    def restore_visible(self) -> None:
        """Do nothing: this broker does not know which messages are unacknowledged."""

    def resend(self, worker: str) -> int:
        """Redeliver all messages that a killed worker ever had, as an operator would."""
        messages = list((self._delivered / worker).glob("*.msg"))
        for message in messages:
            shutil.move(message, self._folder)
        return len(messages)

    def close(self) -> None:
        pass
