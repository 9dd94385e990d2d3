"""One process of the counter test: threads that increment a number protected only by the lock.

Run as a module with a JSON object: ``dlocks``, ``threads``, ``times`` (increments per thread), and
either ``file`` with the number or ``databases`` with a table that contains it.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def in_file(path: Path) -> Callable[[], None]:
    """Increments the number in a file, in two steps."""
    from django_dlock import Lock

    def add() -> None:
        with Lock("counter", wait=60):
            path.write_text(str(int(path.read_text()) + 1))

    return add


def in_transaction() -> Callable[[], None]:
    """Increments the number in a row, which two statements read and write."""
    from django.db import connection, transaction

    from django_dlock import Lock

    def add() -> None:
        # Acquired inside the transaction and released after the commit, so the next holder sees it.
        with (
            transaction.atomic(),
            Lock("counter", wait=60, hold_until="commit"),
            connection.cursor() as cursor,
        ):
            cursor.execute("SELECT value FROM counter")
            value = cursor.fetchone()[0] + 1
            cursor.execute("UPDATE counter SET value = %s", [value])

    return add


def main(job: dict[str, Any]) -> None:
    from django.conf import settings

    settings.configure(
        SECRET_KEY="that of all processes",
        DLOCKS=job["dlocks"],
        DATABASES=job.get("databases", {}),
    )
    add = in_file(Path(job["file"])) if "file" in job else in_transaction()
    together = threading.Barrier(job["threads"])

    def count() -> None:
        from django.db import connections

        together.wait()
        for _ in range(job["times"]):
            add()
        connections.close_all()

    with ThreadPoolExecutor(job["threads"]) as pool:
        for future in [pool.submit(count) for _ in range(job["threads"])]:
            future.result()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
