"""The reference of the settings lists what the tables of the package have, with their defaults."""

from __future__ import annotations

import re
from dataclasses import MISSING
from pathlib import Path

import pytest

from django_dlock import conf
from django_dlock.backends.alias import COMMON
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.shared.options import Option, options_of
from tests.support.backend_tables import BACKENDS, table_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "settings.md"
KEYS, _, REST = PAGE.read_text().partition("## Keys\n")[2].partition("## OPTIONS\n")
OPTIONS = REST.partition("\n## ")[0]
OWN_OPTIONS = {
    "database": "The database backend",
    "etcd": "The etcd backend",
    "failover": "The [fail-over](../howto/failover.md) backend",
    "redis": "The Redis backend",
    "redlock": "The Redlock backend",
    "zookeeper": "The ZooKeeper backend",
}
"""How the list of a backend's options begins in the reference."""
WORDS = {86400.0: "one day"}


def terms(text: str) -> dict[str, str]:
    """The names that a list of terms explains, and what it says of them."""
    return dict(re.findall(r"^`(\w+)`\n((?:: |  ).*(?:\n  .*)*)", text, re.MULTILINE))


def says_default(text: str, it: Option, alias: AliasOptions) -> bool:
    default = it.default(alias)
    number = f"{default:g}" if isinstance(default, float) else f"{default}"
    shown = WORDS.get(default, number) if isinstance(default, float) else number
    return re.search(rf"default is [`\"]*{re.escape(shown)}\b", text) is not None


def test_the_keys_of_an_alias_are_those_of_the_reference() -> None:
    keys = terms(KEYS)
    common = terms(OPTIONS.partition("\nThe ")[0])
    assert {*keys} == {*conf.KEYS}
    assert {*common} == {*COMMON}
    for name, it in options_of(AliasOptions).items():
        text = {**keys, **common}.get(name) or keys[name.upper()]
        if it.default(None) not in (MISSING, None, {}, "raise"):
            assert says_default(text, it, AliasOptions("it", "")), (name, text)


@pytest.mark.parametrize("backend", OWN_OPTIONS)
def test_the_options_of_a_backend_are_those_of_the_reference(backend: str) -> None:
    found = (each for each in BACKENDS if each.startswith(f"{backend}."))
    table, alias = options_of(table_of(next(found))), AliasOptions("it", "")
    listed = OPTIONS.partition(f"\n{OWN_OPTIONS[backend]}")[2].partition("has:\n\n")[2]
    items = re.findall(r"^\* (`.*?): (.*)", listed.partition("\n\n")[0], re.MULTILINE)
    told = {name: text for names, text in items for name in re.findall(r"`(\w+)`", names)}
    assert [*sorted(told)] == sorted(table)
    for name, text in told.items():
        it = table[name]
        default = it.default(alias)
        if isinstance(default, int | float) and name not in ("max_ttl", "session_timeout"):
            assert says_default(text, it, alias), (name, text)
        for number in re.findall(r"minimum (\d+)", text):
            assert re.search(rf"at least {number}\b|\({number}, and", it.kind(alias).told), name
