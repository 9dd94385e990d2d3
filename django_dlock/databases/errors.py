"""What errors of databases mean: one table per driver, for the statements of locks and of records.

Each error has a ``kind`` and a ``fate``. The kind says what became of a statement, to the backend
that keeps locks in a database. The fate says what becomes of the message, whose run has met it.
"""

from __future__ import annotations

import functools
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeAlias

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, Error, ProgrammingError

Kind: TypeAlias = Literal[
    "broken",
    "unreachable",
    "overtaken",
    "transient",
    "unprepared",
    "missing",
    "read-only",
    "denied",
    "refused",
]
"""What an error of the driver means for a statement.

``broken``: the connection cannot be used any more, and the statement may have been executed.
``unreachable``: no connection could be made. ``overtaken``: nothing was executed, because other
callers changed the row first. ``transient``: nothing was executed; a repetition may succeed.
``unprepared``: nothing was executed; the session does not have a prepared statement, or has it
already, or cannot use it since the table was changed.
``missing``: there is no such table or column. ``denied``: wrong credentials or missing rights."""

Fate: TypeAlias = Literal["outage", "contention", "temporary", "missing", "denied", "own"]


class Verdict(NamedTuple):
    """What becomes of the message of a task with a record.

    Attributes:
        requeues: If one of our own statements has failed; otherwise the task fails.
        requeues_body: If a statement of the body has failed, on the record's database.
        counts: Whether a run that had begun counts as one that died, if the database answers the
            next statement. If it does not, this is an outage, which is nobody's fault.
    """

    requeues: bool
    requeues_body: bool
    counts: bool


FATES: Mapping[Fate, Verdict] = {
    # The server is away, or does not write now, whatever the statement.
    "outage": Verdict(requeues=True, requeues_body=True, counts=True),
    # Somebody else was faster. The body's own retries are a matter of the body.
    "contention": Verdict(requeues=True, requeues_body=False, counts=False),
    # It took too long or was cancelled. The body may have set the limit, for us as well.
    "temporary": Verdict(requeues=True, requeues_body=False, counts=True),
    # Of our tables; those of the body are its own.
    "missing": Verdict(requeues=True, requeues_body=False, counts=False),
    "denied": Verdict(requeues=True, requeues_body=False, counts=False),
    "own": Verdict(requeues=False, requeues_body=False, counts=False),
}


class Known(NamedTuple):
    """What one error means."""

    kind: Kind
    fate: Fate
    text: str


POSTGRESQL: Mapping[str, Known] = {
    "08": Known("broken", "outage", "the connection failed"),
    "23505": Known("overtaken", "own", "a unique value exists already"),
    "25006": Known("read-only", "outage", "read-only: a standby, or a primary that hands over"),
    "25P03": Known("broken", "outage", "`idle_in_transaction_session_timeout`"),
    "25P04": Known("broken", "outage", "`transaction_timeout`"),
    "26000": Known("unprepared", "own", "no such prepared statement"),
    "28": Known("refused", "denied", "the login is refused"),
    "3D000": Known("refused", "denied", "no such database"),
    "3F000": Known("missing", "missing", "no such schema"),
    "40001": Known("overtaken", "contention", "could not serialize"),
    "40P01": Known("overtaken", "contention", "deadlock"),
    "42501": Known("denied", "denied", "the user lacks a right"),
    "42703": Known("missing", "missing", "no such column"),
    "42P01": Known("missing", "missing", "no such table"),
    "42P05": Known("unprepared", "own", "a prepared statement exists already"),
    "0A000": Known("unprepared", "own", "not supported, or a cached plan is out of date"),
    "53": Known("refused", "outage", "out of memory or of disk space"),
    "53300": Known("unreachable", "outage", "too many connections"),
    "55P03": Known("transient", "contention", "`lock_timeout`, or NOWAIT"),
    "57": Known("broken", "outage", "the server shuts down, starts, or ends the session"),
    "57014": Known("transient", "temporary", "`statement_timeout`, or cancelled"),
    "58": Known("refused", "outage", "the server's disk or system fails"),
}
"""By SQLSTATE; two characters are a class, which counts if the state is not listed."""

MYSQL: Mapping[int, Known] = {
    0: Known("broken", "outage", "the connection is closed"),
    1020: Known("overtaken", "contention", "the row has changed since it was read"),
    1021: Known("refused", "outage", "the disk is full"),
    1030: Known("refused", "outage", "the storage engine fails, as with a full disk"),
    1037: Known("refused", "outage", "out of memory"),
    1040: Known("unreachable", "outage", "too many connections"),
    1041: Known("refused", "outage", "out of memory"),
    1044: Known("refused", "denied", "no access to the database"),
    1045: Known("refused", "denied", "the login is refused"),
    1047: Known("broken", "outage", "the node has left its Galera cluster"),
    1049: Known("refused", "denied", "no such database"),
    1053: Known("broken", "outage", "the server shuts down"),
    1054: Known("missing", "missing", "no such column"),
    1062: Known("overtaken", "own", "a unique value exists already"),
    1114: Known("refused", "outage", "the table or the disk is full"),
    1129: Known("unreachable", "outage", "the host is blocked after errors"),
    1142: Known("denied", "denied", "the user lacks a right to the table"),
    1143: Known("denied", "denied", "the user lacks a right to the column"),
    1146: Known("missing", "missing", "no such table"),
    1203: Known("unreachable", "outage", "too many connections of the user"),
    1205: Known("transient", "contention", "`innodb_lock_wait_timeout`"),
    1213: Known("overtaken", "contention", "deadlock"),
    1226: Known("unreachable", "outage", "the user has used up a limit"),
    # Of other options, such as ``secure_file_priv``, it is the statement's own; see ``_of_number``.
    1290: Known("read-only", "outage", "`read_only`: a replica, or a primary that hands over"),
    1317: Known("transient", "temporary", "cancelled"),
    1698: Known("refused", "denied", "the login is refused"),
    1792: Known("read-only", "outage", "a read-only transaction"),
    1836: Known("read-only", "outage", "read-only mode"),
    1927: Known("broken", "outage", "the connection was killed"),
    1969: Known("transient", "temporary", "`max_statement_time`"),
    3024: Known("transient", "temporary", "`max_execution_time`"),
    4031: Known("broken", "outage", "the session was idle for too long"),
}
"""By number, for MySQL and MariaDB; 2000 to 2999 are the client's own: the connection is lost."""

LOST = range(2000, 3000)
OF_CLIENT = Known("broken", "outage", "no connection, or it was lost")

SQLITE: Mapping[str, Known] = {
    "is locked": Known("transient", "contention", "another connection writes"),
    "no such table": Known("missing", "missing", "no such table"),
    "no such column": Known("missing", "missing", "no such column"),
    "has no column": Known("missing", "missing", "no such column"),
    "no such": Known("missing", "own", "no such function, index or collation"),
    "readonly database": Known("read-only", "outage", "the file or its folder may not be written"),
    "disk is full": Known("refused", "outage", "the disk is full"),
    "disk i/o error": Known("refused", "outage", "the disk fails"),
    "is malformed": Known("refused", "outage", "the file is damaged"),
    "not a database": Known("refused", "outage", "the file is damaged"),
    "unable to open": Known("broken", "outage", "the file is missing, or may not be read"),
    "interrupted": Known("broken", "temporary", "cancelled"),
    "locking protocol": Known("broken", "contention", "another connection writes"),
    "closed database": Known("broken", "outage", "the connection is closed"),
}
"""By a part of the text; the first that is found counts. Python 3.10 does not tell the code."""

TEMPORARY = ("OperationalError", "InterfaceError")
"""Names of classes of errors after which a statement may succeed later, if no code is listed."""
NO_ANSWER = Known("broken", "outage", "the driver got no answer of the server")
UNKNOWN = Known("refused", "temporary", "another `OperationalError` or `InterfaceError`")
UNKNOWN_OF_SQLITE = UNKNOWN._replace(kind="broken")
OWN = Known("refused", "own", "any other error")


class TablesMissing(ProgrammingError):
    """A database has no table or column of django-dlock; the message says what to run."""


def known(error: BaseException) -> Known:
    """What an error of a driver, or of Django, means."""
    number = error.args[0] if error.args else None
    # Check this before the SQLSTATE: MySQL drivers may have one, but it is less exact.
    if isinstance(number, int):
        return _of_number(number, error)
    for each in _with_cause(error):
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if isinstance(state, str):
            return POSTGRESQL.get(state) or POSTGRESQL.get(state[:2]) or _of_class(error)
    text = str(error).lower()
    for part, meaning in SQLITE.items():
        if part in text:
            return meaning
    if any(isinstance(each, sqlite3.Error) for each in _with_cause(error)):
        return UNKNOWN_OF_SQLITE if _is_temporary_by_class(error) else OWN
    # The drivers of servers have no code if the error is not the server's.
    return NO_ANSWER if _is_temporary_by_class(error) else OWN


def _of_number(number: int, error: BaseException) -> Known:
    if number in LOST:
        return OF_CLIENT
    if number == 1290 and "read" not in str(error).lower():
        # The same number for other options, such as secure_file_priv.
        return OWN
    return MYSQL.get(number) or _of_class(error)


def _of_class(error: BaseException) -> Known:
    return UNKNOWN if _is_temporary_by_class(error) else OWN


def _is_temporary_by_class(error: BaseException) -> bool:
    return any(kind.__name__ in TEMPORARY for kind in type(error).__mro__)


def _with_cause(error: BaseException) -> Iterator[BaseException]:
    """The error, and that of the driver from which Django has made it."""
    yield error
    if error.__cause__ is not None:
        yield error.__cause__


def kind_of(error: BaseException) -> Kind:
    """What became of the statement."""
    return known(error).kind


def fate_of(error: BaseException) -> Fate:
    """What becomes of a message; see ``FATES``."""
    if isinstance(error, TablesMissing):
        return "missing"
    return known(error).fate if isinstance(error, Error) else "own"


def is_outage(error: BaseException) -> bool:
    """Whether the server is away, or does not write now, whatever the statement."""
    return FATES[fate_of(error)].requeues_body


def is_away_or_busy(error: BaseException) -> bool:
    """Whether any statement may succeed later, also one that is not ours."""
    return fate_of(error) in ("outage", "contention")


def ours_may_succeed(error: BaseException) -> bool:
    """Whether one of our own statements may succeed later, although the message is the same."""
    return FATES[fate_of(error)].requeues


def counts(error: BaseException) -> bool:
    """Whether a run that ended with this error counts as one that died; see ``Verdict``."""
    return FATES[fate_of(error)].counts


def is_about_our_tables(error: BaseException) -> bool:
    """Whether a table or column of django-dlock is missing, or may not be used."""
    if isinstance(error, TablesMissing):
        return True
    is_about_a_table = fate_of(error) in ("missing", "denied")
    return is_about_a_table and _our_tables().search(_first_line(error)) is not None


@functools.cache
def _our_tables() -> re.Pattern[str]:
    # Not by their prefix, which the name of a database or of its user may have, too.
    models = apps.get_app_config("django_dlock").get_models()
    names = "|".join(re.escape(model._meta.db_table) for model in models)
    return re.compile(rf"(?<!\w)(?:{names})(?!\w)")


def _first_line(error: BaseException) -> str:
    """PostgreSQL adds the statement, which may name other tables."""
    return str(error).strip().partition("\n")[0]


def migrate_command(using: str) -> str:
    """What makes our tables in a database."""
    option = "" if using == DEFAULT_DB_ALIAS else f" --database {using}"
    return f"manage.py migrate django_dlock{option}"


def missing_in(using: str) -> TablesMissing:
    """The error for a database without our tables."""
    return TablesMissing(
        f"Database {using!r} lacks a table or column of django-dlock; run {migrate_command(using)}"
    )


def explained(error: Error, using: str) -> Error:
    """The error of one of our own statements; with the cure, if our tables are missing."""
    if fate_of(error) != "missing" or isinstance(error, TablesMissing):
        return error
    found = TablesMissing(f"{missing_in(using)}: {_first_line(error)}")
    found.__cause__ = error
    return found


@contextmanager
def explaining(using: str, explain: Callable[[Error, str], Error] = explained) -> Iterator[None]:
    """Raise the explained error in the place of one of a database."""
    try:
        yield
    except Error as error:
        told = explain(error, using)
        if told is error:
            raise
        raise told from error


def of_ours(error: Error, using: str) -> Error:
    """As ``explained``, of a statement that may be about a table of Django or of the project."""
    return explained(error, using) if is_about_our_tables(error) else error
