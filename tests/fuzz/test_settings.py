"""Whatever is in the settings, the system checks say what is wrong, and none of them raises."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.conf import UserSettingsHolder, settings
from django.core import checks as django_checks
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy
from hypothesis import example, given
from hypothesis import strategies as some

from django_dlock import checks, conf, locks, tenancy
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.shared.options import Option, options_of
from django_dlock.metrics import config
from django_dlock.operators.task_url import url_of_task
from django_dlock.tracing import setting as tracing_setting
from tests.support.backend_tables import BACKENDS, NOBODY, SEVERAL, all_fields, entry_of, table_of
from tests.support.fuzzing import examples, json_values, texts

PATHS = ("", ".", ".x", "x.", "..", "os.path", "os.getcwd", "django.db.nothing", "a\0.b")


HUGE = 10**5000
"""Python refuses to write it."""


class Odd:
    """A value of a class of the project."""


ODD = some.one_of(
    json_values(),
    some.sampled_from(
        [
            *(b"", b"\xff", (), ("x",), set(), {1, "a"}, frozenset(), {None: 1}, {1: {}, "a": []}),
            *(Odd(), Odd, len, int, decimal.Decimal("NaN"), 1j, uuid.UUID(int=0), Path("/x")),
            *(dt.timedelta(0), dt.timedelta.max, dt.date.min, gettext_lazy("held"), [[]], [{}]),
            *(float("nan"), float("inf"), -1, 0, HUGE, ...),
        ]
    ),
    some.sampled_from([*PATHS, NOBODY, SEVERAL, "unix:///nowhere", "http://h:x"]),
)


@some.composite
def entries(draw: Any) -> Any:
    """The entry of an alias that is right, but for a few odd values."""
    backend = draw(some.sampled_from(sorted(BACKENDS)))
    # Servers that do not exist are asked for no longer than this.
    entry = {**entry_of(backend, command_timeout=0.05), "TTL": 1.0}
    own = [*options_of(table_of(backend)), "outage_patience"]
    for key in draw(some.sets(some.sampled_from(own), max_size=2)):
        entry["OPTIONS"][key] = draw(ODD)
    for key in draw(some.sets(some.sampled_from(conf.KEYS), max_size=1)):
        entry[key] = draw(ODD)
    return entry


DLOCKS = some.one_of(
    ODD,
    some.dictionaries(some.one_of(some.just("default"), texts(8)), ODD, max_size=3),
    some.fixed_dictionaries({"default": entries()}, optional={"one": entries(), "two": ODD}),
)


@contextlib.contextmanager
def using(name: str, value: Any) -> Iterator[None]:
    """As in the settings of a process that starts, where nothing reads them at once."""
    # As ``override_settings``, but without its signal.
    before, changed = settings._wrapped, UserSettingsHolder(settings._wrapped)
    setattr(changed, name, value)
    settings._wrapped = changed
    locks.reset()
    tenancy.reset()
    try:
        yield
    finally:
        settings._wrapped = before
        locks.reset()
        tenancy.reset()


def checks_pass() -> None:
    """There are only messages, which can be shown."""
    for message in django_checks.run_checks(include_deployment_checks=True):
        assert isinstance(message, django_checks.CheckMessage)
        assert str(message)


@pytest.mark.django_db
@examples(60)
@given(DLOCKS)
@example({})
@example([])
@example("redis://127.0.0.1:1/0")
@example(None)
@example(HUGE)
@example({"default": HUGE})
@example({"default": {"BACKEND": HUGE, "TTL": HUGE, "OPTIONS": HUGE}})
@example({"other": {"BACKEND": "django_dlock.backends.local.LocalBackend"}})
@example({"default": None})
@example({"default": [], 1: {}})
@example({None: {"BACKEND": "django_dlock.backends.local.LocalBackend"}})
def test_the_checks_survive_any_value_of_dlocks(value: Any) -> None:
    with using("DLOCKS", value):
        checks_pass()
        first_use()


def refusal(call: Callable[[], object]) -> str:
    """What the call raises about the settings, if it does."""
    try:
        call()
    except ImproperlyConfigured as error:
        return str(error) or "no text"
    return ""


def first_use() -> None:
    if told := refusal(lambda: list(locks)):
        assert "DLOCKS" in told
    aliases = [] if told else list(locks)
    for alias in dict.fromkeys([*aliases, "default"]):
        # Any other error would end this test.
        told = refusal(partial(locks.__getitem__, alias))
        assert not told or "DLOCKS" in told
        # Our own backends know better.
        assert "cannot check the entry" not in told


# -- each field of each table --------------------------------------------------------------------

LOCAL = {"BACKEND": "django_dlock.backends.local.LocalBackend"}
FIELDS = [*all_fields()]


def refuses(it: Option, alias: AliasOptions, value: Any) -> bool:
    try:
        it.kind(alias).read(value)
    except (TypeError, ValueError):
        return True
    return False


@pytest.mark.django_db
@pytest.mark.parametrize(("backend", "key", "it"), FIELDS, ids=[f"{b}-{k}" for b, k, _ in FIELDS])
@examples(10)
@given(ODD)
@example(None)
@example(HUGE)
@example(-1)
@example(float("nan"))
@example("user:XYZ@host")
@example([("password", "XYZ")])
def test_a_wrong_value_of_any_field_is_told_with_its_place(
    backend: str, key: str, it: Option, value: Any
) -> None:
    entry = entry_of(backend, **{key: value})
    with using("DLOCKS", {"default": entry, "one": LOCAL, "two": LOCAL}):
        told = refusal(partial(locks.__getitem__, "default"))
    place = f"DLOCKS['default']['OPTIONS'][{key!r}] is "
    assert (place in told) == refuses(it, AliasOptions("default", backend), value)
    assert "XYZ" not in told
    # What the field takes may still be wrong for other reasons.
    assert not told or "DLOCKS" in told


@pytest.mark.django_db
@pytest.mark.parametrize("key", conf.KEYS)
@examples(10)
@given(ODD)
@example(HUGE)
@example(float("nan"))
@example("user:XYZ@host")
def test_a_wrong_value_of_any_key_is_told_with_its_place(key: str, value: Any) -> None:
    with using("DLOCKS", {"default": {**LOCAL, key: value}}):
        told = refusal(partial(conf.alias_options, "default"))
    wrong = refuses(options_of(AliasOptions)[key.lower()], AliasOptions("", ""), value)
    assert (f"DLOCKS['default'][{key!r}] is " in told) or not wrong
    assert "XYZ" not in told
    assert not told or "DLOCKS['default']" in told


# -- the other settings --------------------------------------------------------------------------


@pytest.mark.django_db
@examples(50)
@given(
    some.sampled_from(["DLOCK_ADMIN", "DLOCK_METRICS", "DLOCK_SCOPE", "DLOCK_TRACING"]),
    some.one_of(
        ODD,
        some.fixed_dictionaries(
            {}, optional=dict.fromkeys(["EXPORTERS", "GROUP", "RECORDS", "TASK_URL"], ODD)
        ),
    ),
)
@example("DLOCK_ADMIN", HUGE)
@example("DLOCK_METRICS", HUGE)
@example("DLOCK_SCOPE", HUGE)
@example("DLOCK_TRACING", HUGE)
@example("DLOCK_SCOPE", ".x")
@example("DLOCK_METRICS", {"GROUP": ".x"})
def test_the_checks_survive_any_value_of_the_other_settings(name: str, value: Any) -> None:
    with using(name, value):
        for read in (config.read, tenancy.read, tracing_setting.tracer_class):
            told = refusal(read)
            assert not told or name in told
        assert url_of_task("t-1") is None or isinstance(url_of_task("t-1"), str)
        checks_pass()


REDIS_CACHE = "django.core.cache.backends.redis.RedisCache"


@pytest.mark.django_db
@examples(60)
@given(
    some.one_of(
        some.fixed_dictionaries({"default": ODD}, optional={"locks": ODD}),
        some.fixed_dictionaries(
            {
                "default": some.fixed_dictionaries(
                    {"BACKEND": some.one_of(some.just(REDIS_CACHE), ODD)},
                    optional={"LOCATION": ODD, "OPTIONS": ODD},
                )
            }
        ),
    ),
    some.booleans(),
)
def test_our_checks_survive_any_entry_of_caches(caches: Any, named: bool) -> None:
    redis = {"BACKEND": "django_dlock.backends.redis.RedisBackend", "TTL": 1.0}
    options = {"command_timeout": 0.05}
    dlocks = {"default": {**redis, "CACHE": "default", "OPTIONS": options}} if named else None
    with using("DLOCKS", dlocks), using("CACHES", caches):
        for check in (checks.check_settings, checks.check_shared_caches, checks.check_deployment):
            assert all(str(message) for message in check())
        told = refusal(partial(locks.__getitem__, "default"))
        assert not told or "CACHES" in told or "DLOCKS" in told
