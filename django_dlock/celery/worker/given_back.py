"""Messages on their way back to the broker, which does not let this worker publish them again.

The consumer's timer returns each of them when its back-off is over, so no slot of the pool waits.
Meanwhile the worker may fetch another message instead, as for a message with a countdown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ..publishing.refusal import GivenBack

MOST = 10_000
"""Messages whose headers are remembered; a forgotten one begins its back-off anew."""

_headers: OrderedDict[str, dict[str, Any]] = OrderedDict()


def header_of(task_id: Any) -> dict[str, Any] | None:
    """The header of a message that this process gave back, once."""
    return _headers.pop(task_id, None) if _headers and isinstance(task_id, str) else None


def later(consumer: Any, task_id: Any, given: GivenBack, reject: Callable[[bool], object]) -> None:
    """Call ``reject(True)`` on the consumer's thread when the time is over."""
    if given.header is not None and isinstance(task_id, str):
        _headers[task_id] = given.header
        if len(_headers) > MOST:
            _headers.popitem(last=False)
    consumer.call_soon(_schedule, consumer, given.delay, reject)


def _schedule(consumer: Any, delay: float, reject: Callable[[bool], object]) -> None:
    # After a lost connection, the consumer has another one.
    prefetch = consumer.qos
    prefetch.increment_eventually()

    def give_back() -> None:
        prefetch.decrement_eventually()
        reject(True)

    consumer.timer.call_after(delay, give_back)
