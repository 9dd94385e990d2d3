"""A publisher that stops at one step, where the test kills it.

python -m tests.support.publishing STEP ORDER PLACE
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from celery.signals import after_task_publish, before_task_publish


def stop(**facts: Any) -> None:
    """Tell the test, and wait to be killed."""
    print("here", flush=True)
    signal.pause()


def main(step: str, order: str, place: str) -> None:
    from tests.support.tasks_unique import starts

    if step == "reserved":
        before_task_publish.connect(stop)
    elif step == "published":
        after_task_publish.connect(stop)
    starts.delay(int(order), place)
    stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
