"""A process whose threads increment a number in a file, each time under the lock.

Run as ``python -m tests.support.increments SETTINGS FILE TIMES``, with settings as JSON. Every
second time, a transaction of the caller is open, and is rolled back at the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from django.conf import settings

THREADS = 8


def main(settings_json: str, file: str, times: str) -> None:
    configured = json.loads(settings_json)
    settings.configure(
        SECRET_KEY="that of all processes",
        INSTALLED_APPS=["django_dlock"],
        USE_TZ=True,
        **configured,
    )
    import django

    django.setup()
    import logging

    from django.db import connection, transaction

    # It warns about each release inside a transaction, which is intended here.
    logging.disable()
    from django_dlock import Lock

    counter, errors, parent = Path(file), list[BaseException](), os.getppid()

    def add_one() -> None:
        with Lock("counter", wait=None):
            counter.write_text(str(int(counter.read_text()) + 1))

    def run() -> None:
        try:
            for number in range(int(times)):
                if os.getppid() != parent:
                    raise RuntimeError("the test is gone")
                if number % 2:
                    add_one()
                    continue
                with transaction.atomic(), connection.cursor() as cursor:
                    cursor.execute("SELECT 1")
                    add_one()
                    transaction.set_rollback(True)
        except BaseException as error:
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
