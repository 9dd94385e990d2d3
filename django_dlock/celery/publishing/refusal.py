"""What to do if the broker does not let this worker publish.

That is no outage: it lasts until somebody grants the right. Until then a message that cannot run
now goes back to its queue, but not at once, because it would come again at once.
"""

from __future__ import annotations

from typing import Any

from amqp import AccessRefused
from celery.exceptions import Reject

MISSING = (
    "Grant its user the right to write to the default exchange, which RabbitMQ's permissions call "
    "amq.default"
)


class GivenBack(Reject):
    """The message goes back to its queue after ``delay`` seconds, in which no process waits.

    Args:
        header: The header that the message should have had when it comes again.
    """

    def __init__(
        self,
        reason: str = "",
        requeue: bool = True,
        delay: float = 0.0,
        header: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(reason, requeue)
        self.delay, self.header = delay, header
        # A pool's child sends it to the parent.
        self.args = (reason, requeue, delay, header)


def is_refusal(error: object) -> bool:
    """Whether the broker has understood a publish, and its user has no right to it."""
    # Without an import of redis-py, which projects with another broker do not need.
    return isinstance(error, AccessRefused) or type(error).__name__ == "NoPermissionError"
