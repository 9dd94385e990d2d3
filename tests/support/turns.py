"""A process that takes turns on one name, and writes into a file whose turn it is.

Run as ``python -m tests.support.turns DATABASE LOG TURNS``: the project's SQLite file, where each
turn adds a line with the process id, and how many turns. It begins when a line arrives on its
standard input.
"""

from __future__ import annotations

import os
import sys

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
    from django_dlock import Lock

    with Lock(f"first use by {os.getpid()}"):
        pass
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    for _ in range(int(turns)):
        with Lock("name", wait=None), open(log, "a", encoding="ascii") as file:
            file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
