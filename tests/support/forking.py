"""A process that forks again and again while its threads add one to a number under the lock.

Run as ``python -m tests.support.forking DATABASE FILE``: the project's SQLite file, and the one
with the number. Each child adds to the number, too. Between two forks the process closes its
connections, as when settings change.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from tests.support.turns import configure

THREADS, CHILDREN, TIMES = 2, 8, 5
INCREMENTS = (THREADS + 1) * CHILDREN * TIMES
"""Increments made by one process and its children."""


def main(database: str, file: str) -> None:
    configure(database)
    from django_dlock import Lock, clock, locks

    counter, errors = Path(file), list[BaseException]()

    def add(times: int) -> None:
        try:
            for _ in range(times):
                with Lock("counter", wait=None):
                    counter.write_text(str(int(counter.read_text()) + 1))
        except BaseException as error:
            errors.append(error)
            raise

    # A child that is forked during an import could never import that module.
    locks["default"].locked("counter", deadline=clock.now() + 10)
    threads = [threading.Thread(target=add, args=(CHILDREN * TIMES,)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    children = []
    for _ in range(CHILDREN):
        pid = os.fork()
        if pid == 0:
            try:
                add(TIMES)
            finally:
                os._exit(bool(errors))
        children.append(pid)
        locks["default"].close()
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    for thread in threads:
        thread.join()
    sys.exit(bool(errors) or any(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
