"""``python -m tests.fates``: what each error means for a message, for the documentation.

Reads the tables of the code and writes the end of ``docs/reference/fates.md``, and the codes of
each database into ``contributing/fates.md``; tests compare the pages with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from django_dlock import exceptions
from django_dlock.databases.errors import (
    FATES,
    MYSQL,
    NO_ANSWER,
    OF_CLIENT,
    POSTGRESQL,
    SQLITE,
    UNKNOWN,
    Known,
    Verdict,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "fates.md"
HEADING = "## The tables of the code\n"
OF_DRIVERS = ROOT / "contributing" / "fates.md"

REQUEUED = "requeued"
FAILS = "fails"
DIES = "requeued, and counted if the database answers"
OTHERS = "any other `OperationalError` or `InterfaceError`"


KINDS = {
    "outage": "the server is away, or does not write now",
    "contention": "another transaction was faster",
    "temporary": "the statement took too long, or was cancelled",
    "missing": "a table or column does not exist",
    "denied": "the user may not do this, or may not log in",
    "own": "the statement is wrong, or its data are",
}


def table(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]


def of_fate(fate: str, verdict: Verdict) -> str:
    after = DIES if verdict.counts else REQUEUED
    body = DIES if verdict.requeues_body else FAILS
    if fate in ("missing", "denied"):
        body = "fails; requeued if the table is ours"
    before = REQUEUED if verdict.requeues else FAILS
    return f"| {fate} | {before} | {body} | {after if verdict.requeues else FAILS} |"


def of_driver(title: str, what: str, known: Iterable[tuple[str, Known]]) -> list[str]:
    codes: dict[str, list[str]] = {fate: [] for fate in FATES}
    for code, each in known:
        codes[each.fate].append(code)
    rows = (f"| {fate} | {', '.join(alike)} |" for fate, alike in codes.items() if alike)
    return ["", f"## {title}", "", *table("kind", what), *rows]


def coded(known: Mapping[str, Known]) -> list[tuple[str, Known]]:
    return [(f"`{code}`", each) for code, each in known.items()]


def states() -> list[tuple[str, Known]]:
    """SQLSTATEs; a class after its members."""
    rows = sorted(POSTGRESQL.items(), key=lambda row: (row[0][:2], -len(row[0]), row[0]))
    return [
        (f"`{state}`" if len(state) == 5 else f"others of class `{state}`", each)
        for state, each in rows
    ]


def of_the_lock() -> list[str]:
    # Imported here: importing Celery takes long, and the tests of the docs do much else.
    from django_dlock.celery.delivery import locking
    from django_dlock.celery.options import CHOICES, TaskWithOptions

    def option(name: str) -> str:
        others = (
            f"`{value}`" for value in CHOICES[name] if value != getattr(TaskWithOptions, name)
        )
        return f"{getattr(TaskWithOptions, name)}d, by default (`{name}`; or {', '.join(others)})"

    unavailable = exceptions.BackendUnavailable
    rows = [f"| `LockNotAcquired` | {option('if_contended')} |"]
    # Not those that a store keeps to itself.
    public = [it for it in unavailable.__subclasses__() if it.__module__ == exceptions.__name__]
    kinds: list[type[Exception]] = [unavailable, *public]
    names = ", ".join(f"`{kind.__name__}`" for kind in kinds)
    rows.append(f"| {names} | {option('if_unavailable')} |")
    reasons = sorted(re.findall(r"``(\w+)``", exceptions.LeaseLost.__doc__ or ""))
    for away, told in ((False, "counted"), (True, "not counted")):
        alike = [
            f"`{reason}`"
            for reason in reasons
            if locking.was_outage(exceptions.LeaseLost(reason=reason)) is away
        ]
        rows.append(f"| `LeaseLost` ({', '.join(alike)}) | requeued, {told} |")
    return ["", "### The lock's store", "", *table("error", "message"), *rows]


def of_the_broker() -> list[str]:
    from django_dlock.celery.publishing.broker import OUTAGES

    names = [f"`{kind.__module__.partition('.')[0]}.{kind.__name__}`" for kind in OUTAGES]
    names = [name.replace("builtins.", "") for name in names]
    errors = ", ".join(names) + ", and `connection_errors` of kombu's transport"
    told = "not acknowledged, but given back to its queue"
    return [
        "",
        "### The broker, when a message is published again",
        "",
        *table("error", "the old message"),
        f"| {errors} | {told} |",
        "| any other | the task fails |",
    ]


def section() -> str:
    """What the page says below its heading."""
    lines = [
        "",
        "`.venv/bin/python -m tests.fates` writes this part of the page.",
        "`contributing/fates.md` in the repository has the codes of each kind, for each database.",
        "",
        "### By kind of error",
        "",
        *(f"* **{kind}**: {KINDS[kind]}." for kind in FATES),
        "",
        *table("kind", "our statement before the body", "the body's", "ours after it, COMMIT"),
        *(of_fate(fate, verdict) for fate, verdict in FATES.items()),
        *of_the_lock(),
        *of_the_broker(),
    ]
    return "\n".join([*lines, ""])


def codes() -> str:
    """What the page for contributors says: the kind of each error of a database."""
    mysql = [(f"`{number}`", each) for number, each in MYSQL.items()]
    lines = [
        "# Which error is of which kind",
        "",
        "`.venv/bin/python -m tests.fates` writes this page.",
        "[What an error means for a message](../docs/reference/fates.md) explains the kinds.",
        *of_driver(
            "PostgreSQL (psycopg, psycopg2)",
            "SQLSTATE",
            [*states(), ("none, because the server did not answer", NO_ANSWER), (OTHERS, UNKNOWN)],
        ),
        *of_driver(
            "MySQL and MariaDB (mysqlclient, PyMySQL)",
            "number",
            [*mysql, ("`2000` to `2999`", OF_CLIENT), (OTHERS, UNKNOWN)],
        ),
        *of_driver(
            "SQLite",
            "part of the text (the longest counts)",
            [*coded(SQLITE), (OTHERS, UNKNOWN)],
        ),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    import os

    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    django.setup()
    before = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text(before + HEADING + section())
    OF_DRIVERS.write_text(codes())
    print(f"Written: {PAGE.relative_to(ROOT)}, {OF_DRIVERS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
