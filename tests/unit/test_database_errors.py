"""What the errors of the databases' drivers mean for a message."""

from __future__ import annotations

import sqlite3
from typing import Any

import psycopg
import psycopg2
import pymysql
import pytest
from django import db
from django.core.management import CommandError, call_command
from django.db.transaction import TransactionManagementError

from django_dlock.databases.errors import TablesMissing, explained, fate_of, is_about_our_tables

APPS_TABLE, OUR_TABLE = "shop_order", "django_dlock_followup"


def wrapped(error: BaseException) -> Any:
    """The error as Django raises it."""
    names = (kind.__name__ for kind in type(error).__mro__)
    kind = next(getattr(db, name) for name in names if hasattr(db, name))
    made = kind(*error.args)
    made.__cause__ = error
    return made


def of_psycopg(state: str, text: str = "") -> Any:
    return wrapped(psycopg.errors.lookup(state)(text))


def of_psycopg2(state: str, text: str = "") -> Any:
    # Only C code can set the state of an error.
    class Stated(psycopg2.errors.lookup(state)):  # type: ignore[misc]
        pgcode = state

    return wrapped(Stated(text))


@pytest.mark.parametrize("made", [of_psycopg, of_psycopg2])
@pytest.mark.parametrize(
    ("state", "fate"),
    [
        *[(state, "outage") for state in ("25006", "25P03", "57P01", "57P02", "57P03", "53300")],
        *[(state, "outage") for state in ("53100", "58030", "08006")],
        ("40001", "contention"),
        ("40P01", "contention"),
        ("55P03", "contention"),
        ("57014", "temporary"),
        ("55000", "temporary"),
        ("42P01", "missing"),
        ("42501", "denied"),
        # A statement after one that has failed, in a transaction of the body.
        ("25P02", "own"),
        ("23505", "own"),
        ("22003", "own"),
        ("42601", "own"),
    ],
)
def test_what_a_state_of_postgresql_means(made: Any, state: str, fate: str) -> None:
    assert fate_of(made(state)) == fate


@pytest.mark.parametrize("driver", [psycopg, psycopg2])
def test_without_a_state_the_connection_is_gone(driver: Any) -> None:
    assert fate_of(wrapped(driver.OperationalError("the connection is closed"))) == "outage"
    assert fate_of(wrapped(driver.InterfaceError("connection already closed"))) == "outage"
    assert fate_of(wrapped(driver.ProgrammingError("no results to fetch"))) == "own"


@pytest.mark.parametrize(
    ("number", "text", "fate"),
    [
        (1290, "The MariaDB server is running with the --read-only option", "outage"),
        (1290, "The server is running with the --secure-file-priv option", "own"),
        *[(number, "", "outage") for number in (1836, 1040, 1053, 2006, 2013, 1927, 1021, 0)],
        (1213, "Deadlock found", "contention"),
        (1205, "Lock wait timeout exceeded", "contention"),
        (1969, "max_statement_time exceeded", "temporary"),
        (1146, "Table 'shop.x' doesn't exist", "missing"),
        (1142, "INSERT command denied", "denied"),
    ],
)
def test_what_a_number_of_mysql_means(number: int, text: str, fate: str) -> None:
    kind = pymysql.err.error_map.get(number, pymysql.err.OperationalError)
    assert fate_of(wrapped(kind(number, text))) == fate


def test_a_value_that_exists_is_the_bodys_own_on_mysql() -> None:
    assert fate_of(wrapped(pymysql.err.IntegrityError(1062, "Duplicate entry"))) == "own"
    assert fate_of(wrapped(pymysql.err.ProgrammingError(1064, "syntax"))) == "own"


@pytest.mark.parametrize(
    ("error", "fate"),
    [
        (sqlite3.OperationalError("database is locked"), "contention"),
        (sqlite3.OperationalError("database table is locked: shop_order"), "contention"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "outage"),
        (sqlite3.OperationalError("database or disk is full"), "outage"),
        (sqlite3.OperationalError("disk I/O error"), "outage"),
        (sqlite3.OperationalError("unable to open database file"), "outage"),
        (sqlite3.DatabaseError("database disk image is malformed"), "outage"),
        (sqlite3.ProgrammingError("Cannot operate on a closed database."), "outage"),
        (sqlite3.OperationalError("no such table: shop_order"), "missing"),
        (sqlite3.OperationalError("table shop_order has no column named paid"), "missing"),
        (sqlite3.OperationalError("no such function: f"), "own"),
        (sqlite3.OperationalError('near "SELEC": syntax error'), "temporary"),
        (sqlite3.IntegrityError("UNIQUE constraint failed: shop_order.full"), "own"),
    ],
)
def test_what_a_text_of_sqlite_means(error: BaseException, fate: str) -> None:
    assert fate_of(wrapped(error)) == fate


def test_an_error_that_no_database_has_raised_is_the_bodys_own() -> None:
    assert fate_of(ValueError("database is locked")) == "own"
    assert fate_of(KeyError(2006)) == "own"
    assert fate_of(TransactionManagementError("An error occurred")) == "own"


@pytest.mark.parametrize(
    "error",
    [
        of_psycopg("42P01", 'relation "{}" does not exist'),
        of_psycopg("42P01", 'relation "{}" does not exist\nLINE 1: JOIN "django_dlock_fence" ON'),
        of_psycopg("42703", "column {}.ending does not exist"),
        of_psycopg("42501", "permission denied for table {}"),
        wrapped(pymysql.err.ProgrammingError(1146, "Table 'shop.{}' doesn't exist")),
        # The name of the database, or of its user, tells nothing about the table.
        wrapped(pymysql.err.ProgrammingError(1146, "Table 'django_dlock_shop.{}' doesn't exist")),
        wrapped(
            pymysql.err.OperationalError(
                1142, "SELECT command denied to user 'django_dlock_web'@'localhost' for table '{}'"
            )
        ),
        wrapped(sqlite3.OperationalError("no such table: {}")),
    ],
)
def test_the_text_tells_whose_table_is_missing(error: Any) -> None:
    def of(table: str) -> Any:
        args = [arg.format(table) if isinstance(arg, str) else arg for arg in error.args]
        made = type(error)(*args)
        made.__cause__ = error.__cause__
        return made

    assert is_about_our_tables(of(OUR_TABLE))
    assert not is_about_our_tables(of(APPS_TABLE))


def test_only_an_error_about_missing_tables_is_explained() -> None:
    found = explained(of_psycopg("42P01", 'relation "x" does not exist'), "orders")
    assert isinstance(found, TablesMissing)
    assert "run manage.py migrate django_dlock --database orders: relation" in str(found)
    assert explained(found, "orders") is found
    other = of_psycopg("25006")
    assert explained(other, "orders") is other


@pytest.mark.parametrize("command", ["purge_idempotency_records", "publish_pending_followups"])
@pytest.mark.django_db
def test_a_command_without_our_tables_says_what_to_run(command: str, monkeypatch: Any) -> None:
    def refuse(*args: object) -> None:
        raise wrapped(sqlite3.OperationalError("no such table: django_dlock_followup"))

    monkeypatch.setattr(db.models.query.QuerySet, "_fetch_all", refuse)
    with pytest.raises(CommandError, match=r"run manage\.py migrate django_dlock: no such table"):
        call_command(command)
