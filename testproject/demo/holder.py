"""Processes that hold locks for ``make serve``, so that there is something to see in the admin.

``python -m testproject.demo.holder queue NAME`` has some threads take turns with a lock;
``hold NAME TTL`` holds one until the process is killed, or has lost the lock; ``deadlock NAME
NAME`` has two threads that each hold one of the locks and wait for the other.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from django_dlock import Lock
from django_dlock.core import dispatch
from django_dlock.exceptions import LockError

PATIENCE = 60.0
"""Seconds until one of two threads that block each other gives up."""
THREADS = 4
TURN = 12.0
"""Seconds for which each thread holds the lock. With the turns of the others, a thread waits for
longer than 30 s, which is written to the lock events."""


def queue(name: str) -> None:
    """Let threads hold the lock in turn, for ever; all but one of them wait."""
    for number in range(1, THREADS):
        threading.Thread(target=_take_turns, args=(name, number), daemon=True).start()
    _take_turns(name, 0)


def _take_turns(name: str, number: int) -> None:
    while True:
        # If the lock or Redis fails, the next turn tries again.
        with (
            contextlib.suppress(LockError),
            Lock(name, wait=600, metadata={"path": f"/stock/count/?till={number}"}),
        ):
            time.sleep(TURN)
        time.sleep(0.2)


def deadlock(one: str, other: str) -> None:
    """Let two threads block each other until one gives up, again and again."""
    both_hold = threading.Barrier(2)
    threading.Thread(target=_block, args=(other, one, both_hold), daemon=True).start()
    _block(one, other, both_hold)


def _block(mine: str, wanted: str, both_hold: threading.Barrier) -> None:
    while True:
        with contextlib.suppress(LockError), Lock(mine, wait=600, metadata={"path": f"/{mine}/"}):
            both_hold.wait()
            with Lock(wanted, wait=PATIENCE, metadata={"path": f"/{mine}/"}):
                pass
        # One has given up, so the other has got both.
        both_hold.wait()


def hold(name: str, ttl: float) -> None:
    """Hold a lock until it is lost; a waiter takes it over at once from a dead holder."""
    told = threading.Event()
    lock = Lock(name, ttl=ttl, wait=10, on_lost=lambda _lock, _reason: told.set())
    while not _acquired(lock):
        time.sleep(1)
    # Write the take-over event before this process is killed.
    dispatch.flush(10)
    print("held", flush=True)
    told.wait()
    dispatch.flush(10)


def _acquired(lock: Lock) -> bool:
    with contextlib.suppress(LockError):
        return lock.acquire()
    return False


def main() -> None:
    import django

    django.setup()
    what, name, *more = sys.argv[1:]
    if what == "queue":
        queue(name)
    elif what == "deadlock":
        deadlock(name, more[0])
    else:
        hold(name, float(more[0]))


if __name__ == "__main__":
    main()
