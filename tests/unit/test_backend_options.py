"""The tables of the backends' options: one wording for each mistake, whichever backend it is."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass
from typing import Any

import pytest
from django.test import override_settings

from django_dlock import InvalidLockBackend, conf
from django_dlock.backends.alias import COMMON
from django_dlock.backends.base import AliasOptions, BackendOptions
from django_dlock.backends.shared import options as kinds
from django_dlock.backends.shared.options import Kind, options_of
from tests.support.backend_tables import BACKENDS, all_fields, entry_of, table_of

LOCAL = {"BACKEND": "django_dlock.backends.local.LocalBackend"}
ALIAS = AliasOptions("it", "shop.Backend")
FIELDS = [pytest.param(*it, id=f"{it[0]}-{it[1]}") for it in all_fields()]


def problems(entry: dict[str, Any]) -> list[conf.Problem]:
    with override_settings(DLOCKS={"it": entry, "one": LOCAL, "two": LOCAL}):
        return conf.problems_of("it")


# -- all tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_entry_is_no_problem(backend: str) -> None:
    assert problems(entry_of(backend)) == []


@pytest.mark.parametrize(("backend", "name", "it"), FIELDS)
def test_a_default_is_a_value_that_the_field_takes(
    backend: str, name: str, it: kinds.Option
) -> None:
    if name not in ("primary", "standby"):
        default = it.default(ALIAS)
        assert it.kind(ALIAS).read(default) == default


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_key_is_told_with_all_that_are_known(backend: str) -> None:
    (problem,) = problems(entry_of(backend, zzz=1))
    assert problem == (
        "E008",
        "DLOCKS['it']['OPTIONS'] has the unknown key 'zzz'.",
        f"It takes {sorted([*options_of(table_of(backend)), *COMMON])}.",
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_key_is_told_with_the_one_that_may_be_meant(backend: str) -> None:
    for key, meant in [
        ("comand_timeout", "command_timeout"),
        ("Outage_Patience", "outage_patience"),
    ]:
        (problem,) = problems(entry_of(backend, **{key: 1}))
        assert problem.message.endswith(f"unknown key {key!r}; did you mean {meant!r}?")


@pytest.mark.parametrize(("backend", "name", "it"), FIELDS)
def test_a_wrong_type_is_told_with_what_is_taken_and_what_for(
    backend: str, name: str, it: kinds.Option
) -> None:
    found = problems(entry_of(backend, **{name: 1j}))
    problem = next(each for each in found if "1j" in each.message or "*****" in each.message)
    assert problem.id == (it.check_id or "E008")
    shown = "'********'" if name in ("password", "credentials") else "1j"
    assert problem.message == f"DLOCKS['it']['OPTIONS'][{name!r}] is {shown}."
    assert problem.hint.startswith(
        f"It takes {it.kind(AliasOptions('it', backend)).told}: {it.what}"
    )


@pytest.mark.parametrize(("backend", "name", "it"), FIELDS)
def test_no_message_shows_a_secret(backend: str, name: str, it: kinds.Option) -> None:
    for value in ({"password": "XYZ"}, [("password", "XYZ")], "redis://:XYZ@h", ["a:XYZ@h"]):
        assert "XYZ" not in repr(problems(entry_of(backend, **{name: value})))


@pytest.mark.parametrize("key", ["primary", "standby"])
def test_a_missing_field_is_told(key: str) -> None:
    entry = entry_of("failover.FailoverBackend")
    del entry["OPTIONS"][key]
    (problem,) = problems(entry)
    assert problem.message == f"DLOCKS['it']['OPTIONS'][{key!r}] is missing."
    assert problem.hint.startswith("It takes a non-empty string: the alias of DLOCKS")


def test_a_default_that_other_settings_forbid_is_told() -> None:
    (problem,) = problems(entry_of("failover.FailoverBackend", command_timeout=2.0))
    assert "['view_ttl'] is not set, and its default of 5.0 is not" in problem.message
    assert "at least 6 (1, and 3 times the command_timeout)" in problem.hint


@pytest.mark.parametrize(
    ("backend", "key"),
    [
        ("database.DatabaseBackend", "CACHE"),
        ("database.DatabaseBackend", "LOCATION"),
        ("etcd.EtcdBackend", "CACHE"),
        ("failover.FailoverBackend", "CACHE"),
        ("failover.FailoverBackend", "LOCATION"),
        ("redlock.RedlockBackend", "CACHE"),
        ("zookeeper.ZooKeeperBackend", "CACHE"),
    ],
)
def test_a_place_that_the_backend_does_not_take_is_told(backend: str, key: str) -> None:
    (problem,) = problems({**entry_of(backend), key: "default"})
    message = f"DLOCKS['it'] has {key!r}, which this backend does not take."
    assert (problem.id, problem.message) == ("E006", message)


@pytest.mark.parametrize("backend", [name for name, location in BACKENDS.items() if location])
def test_a_missing_location_is_told(backend: str) -> None:
    entry = entry_of(backend)
    del entry["LOCATION"]
    (problem,) = problems(entry)
    assert problem.id == "E006"
    assert problem.message.endswith("'LOCATION' to say where its locks are kept.")


@pytest.mark.parametrize(("backend", "name", "it"), FIELDS)
def test_what_is_read_has_a_repr_without_passwords(
    backend: str, name: str, it: kinds.Option
) -> None:
    required = {"max_ttl": 30.0, "session_timeout": 30.0, "primary": "one", "standby": "two"}
    table = table_of(backend)
    given = {key: value for key, value in required.items() if key in options_of(table)}
    shown = repr(table(**{**given, name: "user:XYZ@host"}))
    assert f"{name}='********" in shown
    assert "XYZ" not in shown


# -- what a field takes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (kinds.text(), {"a": "a", "a\nb": "a\nb"}, ["", 1, None, b"a"]),
        (kinds.text("digits", r"\d+"), {"12": "12"}, ["", "1a", 12]),
        (kinds.texts(), {"a": "a", ("a", "b"): ("a", "b")}, ["", [], ["a", ""], [1], None]),
        (kinds.choice("a", "b.c"), {"b.c": "b.c"}, ["bxc", "", None, ["a"]]),
        (kinds.switch(), {True: True, False: False}, [1.5, "True", None]),
        (kinds.whole(3), {3: 3, 65_535: 65_535}, [2, 3.0, True, "3", 2**16, 10**5000]),
        (kinds.fraction(0.5), {0: 0.0, 0.49: 0.49}, [0.5, -0.1, math.nan, True, "0"]),
        (
            kinds.duration(1, 5),
            {1: 1.0, 5: 5.0, dt.timedelta(seconds=2): 2.0},
            [0.9, 5.1, math.nan, math.inf, dt.timedelta(days=1), True, "1", 10**5000],
        ),
        (kinds.duration(1, above=True), {1.1: 1.1}, [1]),
        (kinds.or_none(kinds.whole(0)), {None: None, 0: 0}, ["", -1]),
        (kinds.dictionary(), {}, [[], None, "a"]),
        (kinds.arguments(), {}, [{1: 2}, {"a b": 1}, [("a", 1)], None]),
        (
            kinds.addresses(),
            {(("h", 1), ("i", "65535")): (("h", 1), ("i", 65535)), (): ()},
            [None, "h:1", [1], [("h",)], [("h", 0)], [("h", 2**16)], [("h", True)], [("", 1)]],
        ),
        (kinds.addresses(at_least=1), {}, [[], ()]),
    ],
)  # fmt: skip
def test_a_kind_takes_what_it_says(
    kind: Kind[Any], right: dict[Any, Any], wrong: list[Any]
) -> None:
    for given, read in right.items():
        assert kind.read(given) == read
        assert type(kind.read(given)) is type(read)
    for value in wrong:
        with pytest.raises((TypeError, ValueError)):
            kind.read(value)


# -- a table of another package ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShopOptions(BackendOptions):
    check_id = "shop.E001"

    user: str | None = kinds.option(kinds.or_none(kinds.text()), "who", None, needs="secret")
    secret: str | None = kinds.option(kinds.or_none(kinds.text()), "its password", None)
    size: int = kinds.option(kinds.whole(1), "how much")


def test_another_package_reads_a_typed_table_and_reports_under_its_own_id() -> None:
    given = {"size": "much", "sise": 1, "user": "me"}
    found = ShopOptions.problems(AliasOptions("it", "shop.Backend", options=given))
    assert [problem[:2] for problem in found] == [
        ("shop.E001", "DLOCKS['it']['OPTIONS'] has the unknown key 'sise'; did you mean 'size'?"),
        ("shop.E001", "DLOCKS['it']['OPTIONS'] has 'user', but no 'secret'."),
        ("shop.E001", "DLOCKS['it']['OPTIONS']['size'] is 'much'."),
    ]
    with pytest.raises(
        InvalidLockBackend, match="It takes a whole number, at least 1 and at most 65535: how much"
    ):
        ShopOptions.read(AliasOptions("it", "shop.Backend", options=given))
    own = ShopOptions.read(AliasOptions("it", "shop.Backend", options={"size": 2}))
    assert own == ShopOptions(size=2)
