"""A receiver and an ``on_lost`` that use the ORM survive a cut connection, and keep none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connections

from django_dlock import LeaseLost, Lock, locks, signals
from django_dlock.core import dispatch
from tests.support.databases import until
from tests.support.sessions import END, IS_THERE, THIS, ask, gone_from_server

LOCAL = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}


@pytest.fixture(params=["a receiver", "on_lost"])
def lose(
    request: pytest.FixtureRequest, settings: Any, database: str, django_db_blocker: Any
) -> Iterator[Any]:
    """Loses a lock, and returns what the function of the project has returned or raised."""
    settings.DLOCKS = LOCAL
    locks.reset()
    use: list[Any] = []
    told: list[Any] = []

    def call(*_: object, **__: object) -> None:
        try:
            told.append(use[-1]())
        except Exception as error:
            told.append(error)

    def lose(function: Any) -> Any:
        use.append(function)
        lock = Lock("shop:1", on_lost=call if request.param == "on_lost" else None)
        assert lock.acquire()
        assert locks["default"].break_("shop:1", owner=lock.owner or "")
        with pytest.raises(LeaseLost):
            lock.renew()
        assert dispatch.flush(30)
        # No call of ``on_lost`` is waited for that takes longer than half a second.
        until(lambda: told)
        return told.pop()

    if request.param != "on_lost":
        signals.lost.connect(call)
    # The databases are only read.
    with django_db_blocker.unblock():
        yield lose
        connections[database].close()
    signals.lost.disconnect(call)
    locks.reset()


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
def test_g2_a_connection_that_was_cut_breaks_no_later_call(
    database: str, lose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor = connections[database].vendor
    # As in projects that keep connections.
    monkeypatch.setitem(connections[database].settings_dict, "CONN_MAX_AGE", None)

    def use() -> object:
        list(Group.objects.using(database).all())
        return ask(database, THIS[vendor])

    session = lose(use)
    assert isinstance(session, int)

    def meets_the_cut() -> object:
        mine = ask(database, THIS[vendor])
        end(mine)
        return use()

    def end(mine: object) -> None:
        ender = threading.Thread(target=lambda: _end(database, vendor, mine))
        ender.start()
        ender.join()

    error = lose(meets_the_cut)
    assert isinstance(error, Exception)
    last = lose(use)
    assert isinstance(last, int), last
    # While there is nothing to do, no session is left.
    until(lambda: not ask(database, IS_THERE[vendor], last))


def _end(database: str, vendor: str, session: object) -> None:
    try:
        ask(database, END[vendor], session)
        gone_from_server(database, session)
    finally:
        connections[database].close()


@pytest.mark.parametrize("database", ["postgres", "mariadb"], indirect=True)
def test_without_persistent_connections_none_outlives_its_call(database: str, lose: Any) -> None:
    vendor = connections[database].vendor
    session = lose(lambda: ask(database, THIS[vendor]))
    until(lambda: not ask(database, IS_THERE[vendor], session))
