"""Databases besides that of the settings, which is SQLite: a PostgreSQL and a MariaDB."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

ALL = ("default", "postgres", "mariadb")
"""The aliases with which tests of statements run."""


@contextmanager
def added(alias: str, settings: dict[str, Any]) -> Iterator[str]:
    """Make the database known to ``connections`` under this alias."""
    configured = connections.configure_settings({"default": {}, alias: settings})
    connections.settings[alias] = configured[alias]
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias], connections.settings[alias]


WAITING = {
    "postgresql": "SELECT count(*) FROM pg_locks WHERE NOT granted",
    "mysql": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}


def waits(alias: str) -> bool:
    """Whether somebody waits for a lock of this database; not for SQLite."""
    with connections[alias].cursor() as cursor:
        cursor.execute(WAITING[connections[alias].vendor])
        return bool(cursor.fetchone()[0])


def wait_until_one_waits(alias: str, over: Callable[[], bool] = lambda: False) -> None:
    """Block until somebody waits for a lock of this database, or ``over()`` is true.

    SQLite does not report waiters; a test must then be correct whether they already wait or not.
    """
    statement = WAITING.get(connections[alias].vendor)
    give_up = time.monotonic() + 20
    with connections[alias].cursor() as cursor:
        while statement is not None and not over():
            cursor.execute(statement)
            if cursor.fetchone()[0]:
                return
            assert time.monotonic() < give_up, "nobody waits"
            # Within a tenth of a second, MariaDB repeats its previous answer.
            time.sleep(0.12)


def until(condition: Callable[[], bool], patience: float = 20.0) -> None:
    """Block until the condition holds, for at most ``patience`` seconds."""
    give_up = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < give_up, "the condition did not become true"
        time.sleep(0.01)
