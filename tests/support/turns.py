"""A process that takes turns on one name, and writes into a file whose turn it is.

Run as ``python -m tests.support.turns DATABASE LOG TURNS``: the project's SQLite file, the file to
which each turn adds a line with the process id, and the number of turns. It begins when a line with
a number arrives on its standard input. It keeps its first turn until so many others are waiting.
"""

from __future__ import annotations

import os
import sys
import time

from django.conf import settings


def configure(database: str) -> None:
    """Keep locks beside this SQLite file."""
    settings.configure(
        INSTALLED_APPS=["django_dlock"],
        USE_TZ=True,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database}},
        DLOCKS={
            "default": {
                "BACKEND": "django_dlock.backends.database.DatabaseBackend",
                # The machine may have other work.
                "OPTIONS": {"command_timeout": 10.0, "outage_patience": 60.0},
            }
        },
    )
    import django

    django.setup()


def main(database: str, log: str, turns: str) -> None:
    configure(database)
    from django_dlock import Lock, locks

    with Lock(f"first use by {os.getpid()}"):
        pass
    print("ready", flush=True)
    if not (others := sys.stdin.readline()):
        return
    for number in range(int(turns)):
        with Lock("name", wait=None), open(log, "a", encoding="ascii") as file:
            if number == 0 and int(others):
                print("holding", flush=True)
                while (info := locks["default"].get("name")) is None or info.waiting < int(others):
                    time.sleep(0.01)
            file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
