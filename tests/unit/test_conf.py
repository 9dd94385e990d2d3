"""``DLOCKS``: what is read from it, what is wrong in it, and how errors are reported."""

from __future__ import annotations

import datetime as dt
import math
import subprocess
import sys
from dataclasses import make_dataclass
from typing import Any

import pytest
from django.core.cache.backends.redis import RedisCache
from django.test import override_settings

from django_dlock import Lock, conf, idempotent_view, locked_view, locks
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.etcd import EtcdBackend
from django_dlock.backends.local import LocalBackend
from django_dlock.backends.redis import RedisBackend
from django_dlock.backends.redis.config import is_redis_cache
from django_dlock.backends.redlock import RedlockBackend
from django_dlock.backends.shared.options import option, text
from django_dlock.backends.zookeeper import ZooKeeperBackend
from django_dlock.exceptions import InvalidLockBackend

REDIS = "django_dlock.backends.redis.RedisBackend"
LOCAL = "django_dlock.backends.local.LocalBackend"
DJANGO = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"
MEMORY = "django.core.cache.backends.locmem.LocMemCache"


class OurCache(RedisCache):
    """A project's own cache class, based on Django's."""


class Layered(LocalBackend):
    """Uses the aliases in its LOCATION, and takes any option."""

    own_options = None

    @classmethod
    def aliases_named(cls, options: AliasOptions) -> tuple[str, ...]:
        return tuple(options.location or ())


def layered(**named: list[str] | None) -> dict[str, Any]:
    """Aliases, and the aliases that each of them uses."""
    return {
        alias: {"BACKEND": LOCAL}
        if others is None
        else {"BACKEND": f"{__name__}.Layered", "LOCATION": others}
        for alias, others in named.items()
    }


def redis_cache(backend: str = DJANGO) -> dict[str, Any]:
    return {"default": {"BACKEND": backend, "LOCATION": "redis://h/1"}}


def read(**entry: Any) -> Any:
    with override_settings(DLOCKS={"default": {"BACKEND": LOCAL, **entry}}):
        return conf.alias_options("default")


def problems(dlocks: Any, caches: Any = None) -> list[conf.Problem]:
    with override_settings(DLOCKS=dlocks, CACHES=caches or redis_cache()):
        return conf.problems()


# -- reading --------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_documentation() -> None:
    options = read()
    assert (options.alias, options.backend, options.key_prefix) == ("default", LOCAL, "dlock")
    assert (options.ttl, options.wait, options.max_hold) == (30.0, 10.0, 86400.0)
    assert options.stream_max_hold == 300.0
    assert (options.command_timeout, dict(options.options)) == (1.0, {})
    assert options.outage_patience == 5.0


def test_every_key_is_read() -> None:
    options = read(
        LOCATION="redis://h/1",
        KEY_PREFIX="shop",
        TTL=60,
        WAIT=dt.timedelta(minutes=1),
        MAX_HOLD=3600,
        STREAM_MAX_HOLD=dt.timedelta(minutes=1),
        OPTIONS={"command_timeout": 0.5, "outage_patience": 0},
    )
    assert (options.location, options.key_prefix) == ("redis://h/1", "shop")
    assert (options.ttl, options.wait, options.max_hold) == (60.0, 60.0, 3600.0)
    assert options.stream_max_hold == 60.0
    assert (options.command_timeout, options.outage_patience) == (0.5, 0.0)
    assert dict(options.options) == {}


def test_a_location_may_be_a_list() -> None:
    assert read(LOCATION=["redis://a/1", "redis://b/1"]).location == ("redis://a/1", "redis://b/1")


def test_other_options_are_passed_to_the_backend() -> None:
    entry = {"BACKEND": f"{__name__}.Layered", "OPTIONS": {"spin": 0}}
    with override_settings(DLOCKS={"default": entry}):
        assert conf.alias_options("default").options == {"spin": 0}


@pytest.mark.parametrize(("wait", "read_as"), [(None, None), (0, 0.0)])
def test_wait_may_be_none_or_zero(wait: Any, read_as: Any) -> None:
    assert read(WAIT=wait).wait == read_as


@pytest.mark.parametrize("backend", [DJANGO, DJANGO_REDIS, f"{__name__}.OurCache"])
def test_without_dlocks_the_default_follows_a_redis_cache(backend: str) -> None:
    with override_settings(DLOCKS=None, CACHES=redis_cache(backend)):
        assert conf.aliases() == ["default"]
        options = conf.alias_options("default")
        assert conf.problems() == []
    assert (options.backend, options.cache) == (REDIS, "default")


def test_without_dlocks_and_a_redis_cache_the_default_is_the_database() -> None:
    with override_settings(DLOCKS=None, CACHES={"default": {"BACKEND": MEMORY}}):
        assert conf.alias_options("default").backend == conf.DATABASE_BACKEND
        assert conf.problems() == []
        with pytest.raises(InvalidLockBackend, match=r"'other'.* only 'default'"):
            conf.alias_options("other")


@pytest.mark.parametrize("databases", [{}, {"default": {}}, {"other": {"ENGINE": "x"}}])
@pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")
def test_without_dlocks_redis_cache_or_database_there_is_an_error_and_no_silent_default(
    databases: Any,
) -> None:
    caches = {"default": {"BACKEND": MEMORY}}
    with (
        override_settings(DLOCKS=None, CACHES=caches, DATABASES=databases),
        pytest.raises(InvalidLockBackend, match=r"DATABASES\['default'\] is not set\. Define"),
    ):
        Lock("it")


def test_aliases_are_those_of_dlocks() -> None:
    with override_settings(DLOCKS={"a": {"BACKEND": LOCAL}, "b": {"BACKEND": LOCAL}}):
        assert list(locks) == ["a", "b"]
        with pytest.raises(InvalidLockBackend, match=r"'default' in DLOCKS.*\['a', 'b'\]"):
            Lock("it")


SHORT = {"OPTIONS": {"command_timeout": 0.2}}

# -- errors -------------------------------------------------------------------------

WRONG = [
    ("E001", ["default"], "must be a dict of aliases"),
    ("E001", "redis://h/0", "must be a dict of aliases"),
    ("E002", {"default": "redis://h/0"}, "must be a dict"),
    ("E003", {"default": {"BACKEND": LOCAL, "TTLL": 3}}, "unknown key 'TTLL'; did you mean 'TTL'"),
    ("E003", {"default": {"BACKEND": LOCAL, "TIMEOUT": 3}}, "unknown key 'TIMEOUT'"),
    ("E004", {"default": {}}, r"\['BACKEND'\] is missing"),
    ("E004", {"default": {"BACKEND": 7}}, r"\['BACKEND'\] is 7"),
    ("E004", {"default": {"BACKEND": LOCAL, "KEY_PREFIX": ""}}, r"\['KEY_PREFIX'\] is ''"),
    ("E004", {"default": {"BACKEND": LOCAL, "LOCATION": 6379}}, r"\['LOCATION'\] is 6379"),
    ("E004", {"default": {"BACKEND": LOCAL, "OPTIONS": []}}, r"\['OPTIONS'\] is \[\]"),
    ("E005", {"default": {"BACKEND": LOCAL, "TTL": "30"}}, r"\['TTL'\] is '30'.*a number"),
    ("E005", {"default": {"BACKEND": LOCAL, "TTL": True}}, r"\['TTL'\] is True"),
    ("E005", {"default": {"BACKEND": LOCAL, "TTL": math.inf}}, r"\['TTL'\] is inf.*at most"),
    ("E005", {"default": {"BACKEND": LOCAL, "WAIT": -1}}, r"\['WAIT'\] is -1.*at least 0"),
    ("E005", {"default": {"BACKEND": LOCAL, "WAIT": math.nan}}, r"\['WAIT'\] is nan"),
    (
        "E005",
        {"default": {"BACKEND": LOCAL, "TTL": 10**8, "OPTIONS": {"command_timeout": 86_401}}},
        r"\['command_timeout'\] is 86401.*at most 86400",
    ),
    ("E005", {"default": {"BACKEND": LOCAL, "MAX_HOLD": 0}}, r"\['MAX_HOLD'\] is 0"),
    ("E005", {"default": {"BACKEND": LOCAL, "STREAM_MAX_HOLD": 0}}, r"'STREAM_MAX_HOLD'\] is 0"),
    (
        "E005",
        {"default": {"BACKEND": LOCAL, "OPTIONS": {"command_timeout": 0}}},
        r"\['command_timeout'\] is 0.*more than 0",
    ),
    ("E006", {"default": {"BACKEND": REDIS}}, "no 'CACHE' or 'LOCATION'"),
    (
        "E006",
        {"default": {"BACKEND": REDIS, "CACHE": "default", "LOCATION": "redis://h/0"}},
        "has both 'CACHE' and 'LOCATION'; it takes one of them",
    ),
    ("E006", {"default": {"BACKEND": REDIS, "LOCATION": "redis://h/x"}}, "the database 'x'"),
    ("E006", {"default": {"BACKEND": REDIS, "LOCATION": "redis://h?db=x"}}, "the database 'x'"),
    ("E006", {"default": {"BACKEND": REDIS, "LOCATION": "redis://"}}, "names no host"),
    ("E006", {"default": {"BACKEND": REDIS, "LOCATION": "redis://:6379/0"}}, "names no host"),
    ("E006", {"default": {"BACKEND": REDIS, "LOCATION": "rediss://:pw@/0"}}, "names no host"),
    ("E006", {"default": {"BACKEND": REDIS, "LOCATION": "h:6379"}}, "does not begin with redis://"),
    ("E006", {"default": {"BACKEND": REDIS, "LOCATION": "redis://h:port"}}, "a port that is not"),
    ("E006", {"default": {"BACKEND": REDIS, "LOCATION": "redis://:a#b@h/0"}}, "%23"),
    ("E006", {"default": {"BACKEND": REDIS, "LOCATION": "redis://:1/b@h/0"}}, "/ before its @"),
    ("E006", {"default": {"BACKEND": REDIS, "CACHE": "locks"}}, "CACHES does not define"),
    (
        "E006",
        {"default": {"BACKEND": REDIS, "LOCATION": ["redis://a/0", "redis://b/0"]}},
        "is a list, but .* one Redis",
    ),
    ("E004", {"default": {"BACKEND": LOCAL, "LOCATION": []}}, r"\['LOCATION'\] is \[\]"),
    (
        "E004",
        {"default": {"BACKEND": LOCAL, "LOCATION": ["a", ""]}},
        r"\['LOCATION'\] is \['a', ''\]",
    ),
    (
        "E005",
        {"default": {"BACKEND": LOCAL, "OPTIONS": {"outage_patience": -1}}},
        r"\['outage_patience'\] is -1.*at least 0",
    ),
    (
        "E008",
        {"default": {"BACKEND": LOCAL, "OPTIONS": {"spin": 0}}},
        r"OPTIONS'\] has the unknown key 'spin'",
    ),
    ("E008", {"default": {"BACKEND": "nowhere.Backend"}}, "cannot import 'nowhere.Backend'"),
    ("E008", {"default": {"BACKEND": "redis"}}, "for example 'django_dlock.backends.redis.Redis"),
    ("E008", {"default": {"BACKEND": "nowhere.Db"}}, "'django_dlock.backends.database.Database"),
    ("E002", {"default": "redis://a/0"}, r"a dict, as in DLOCKS = \{'default': \{'BACK"),
    ("E008", {"default": {"BACKEND": "django.http.HttpRequest"}}, "is not a subclass"),
    ("E009", layered(default=["a", "b"], a=None), "names the alias 'b', which DLOCKS does not"),
    ("E009", layered(default=["default"]), "uses itself: 'default' → 'default'"),
    ("E007", {"default": {"BACKEND": LOCAL, "TTL": 2.9}}, "less than 3 times the command_timeout"),
    (
        "E007",
        {"default": {"BACKEND": LOCAL, "OPTIONS": {"command_timeout": 11}}},
        "less than 3 times the command_timeout of 11 s",
    ),
]


def test_a_ttl_of_exactly_three_times_the_command_timeout_is_enough() -> None:
    # In floating point, 3 * 0.2 is more than 0.6.
    assert read(TTL=0.6, OPTIONS={"command_timeout": 0.2}).ttl == 0.6
    assert len(problems({"default": {"BACKEND": LOCAL, "TTL": 0.5999, **SHORT}})) == 1


@pytest.mark.parametrize(("check_id", "dlocks", "message"), WRONG)
def test_a_wrong_setting_is_reported_by_a_check_and_raised_at_first_use(
    check_id: str, dlocks: Any, message: str
) -> None:
    found = problems(dlocks)
    assert [problem.id for problem in found] == [check_id]
    assert found[0].hint
    with (
        override_settings(DLOCKS=dlocks, CACHES=redis_cache()),
        pytest.raises(InvalidLockBackend, match=message),
    ):
        Lock("it")


@pytest.mark.parametrize(
    ("location", "options"),
    [
        ("unix:///run/redis.sock", {}),
        ("redis://?host=h", {}),
        ("redis://", {"connection_kwargs": {"host": "h"}}),
        ("redis:///0", {"sentinels": [("h", 26379)], "service_name": "main"}),
    ],
)
def test_a_url_needs_no_host_if_something_else_says_where_redis_is(
    location: str, options: dict[str, Any]
) -> None:
    entry = {"BACKEND": REDIS, "LOCATION": location, "OPTIONS": options}
    assert problems({"default": entry}) == []


def test_a_cache_that_is_not_redis_is_reported() -> None:
    caches = {"default": {"BACKEND": MEMORY}}
    (problem,) = problems({"default": {"BACKEND": REDIS, "CACHE": "default"}}, caches)
    assert problem.id == "E006"
    assert "not a Redis cache" in problem.message


def test_a_cache_that_cannot_be_imported_is_not_redis() -> None:
    assert not is_redis_cache("nowhere.Cache")


def test_all_errors_of_all_aliases_are_reported_together() -> None:
    found = problems({"a": {"BACKEND": LOCAL, "TTL": "x", "X": 1}, "b": 3, "c": {"BACKEND": LOCAL}})
    assert sorted(problem.id for problem in found) == ["E002", "E003", "E005"]


def test_one_wrong_alias_does_not_stop_the_others() -> None:
    with override_settings(DLOCKS={"default": {"BACKEND": LOCAL}, "bad": {"BACKEND": 7}}):
        with Lock("it"):
            pass
        with pytest.raises(InvalidLockBackend):
            Lock("it", using="bad")


# -- aliases that name aliases -------------------------------------------------------------


def test_a_backend_can_use_the_aliases_that_it_names() -> None:
    with override_settings(DLOCKS=layered(default=["a", "b"], a=["b"], b=None)):
        assert conf.problems() == []
        assert locks["default"].other("b") is locks["b"]


def test_a_circle_of_aliases_is_an_error_of_these_aliases_only() -> None:
    found = problems(layered(default=["a"], a=["b", "c"], b=None, c=["a"]))
    assert [problem.id for problem in found] == ["E009", "E009"]
    assert "'a' → 'c' → 'a'" in found[0].message
    assert "'c' → 'a' → 'c'" in found[1].message


# -- durations -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "number"), [(1, 1.0), (0.5, 0.5), (0, 0.0), (dt.timedelta(minutes=1), 60.0)]
)
def test_a_duration_is_a_number_of_seconds_or_a_timedelta(value: Any, number: float) -> None:
    assert conf.seconds(value, what="it") == number


@pytest.mark.parametrize("value", ["1", None, True, [1], 1j])
def test_a_duration_of_another_type_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"it is .*seconds .* or a timedelta"):
        conf.seconds(value, what="it")


TOO_LONG = [math.inf, math.nan, dt.timedelta.max, 1e308]


NEGATIVE = [-1, -0.001, dt.timedelta(seconds=-1)]
HUGE = [pytest.param(10**5000, id="huge"), pytest.param(-(10**5000), id="negative")]


@pytest.mark.parametrize("value", [*NEGATIVE, *HUGE, *TOO_LONG])
def test_a_duration_out_of_range_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"it is .* must be at least 0 and at most"):
        conf.seconds(value, what="it")


def test_the_minimum_of_a_duration_may_be_exclusive() -> None:
    assert conf.seconds(0.1, what="it", above=True) == 0.1
    with pytest.raises(ValueError, match="more than 0 and"):
        conf.seconds(0, what="it", above=True)


def _renewed(value: Any) -> None:
    with Lock("it", using="local") as lock:
        lock.renew(value)


DURATIONS: dict[str, Any] = {
    "ttl": lambda value: Lock("it", using="local", ttl=value),
    "wait": lambda value: Lock("it", using="local", wait=value),
    "max_hold": lambda value: Lock("it", using="local", max_hold=value),
    "min_hold": lambda value: Lock("it", using="local", min_hold=value),
    "timeout": lambda value: Lock("it", using="local").acquire(timeout=value),
    "renew": _renewed,
    "stream_max_hold": lambda value: locked_view("it", stream_max_hold=value)(lambda request: None),
    "idempotency_ttl": lambda value: idempotent_view(idempotency_ttl=value)(lambda request: None),
}
SETTINGS = ("TTL", "WAIT", "MAX_HOLD", "STREAM_MAX_HOLD", "command_timeout", "outage_patience")
ALIASES = {
    "failover": ("view_ttl", "max_ttl", "failover_after", "failback_after"),
    "redlock": ("max_ttl",),
    "database": ("poll_interval",),
    "zookeeper": ("session_timeout",),
}


@pytest.mark.parametrize("value", TOO_LONG, ids=repr)
@pytest.mark.parametrize("option", DURATIONS)
def test_each_option_refuses_a_duration_that_is_too_long(option: str, value: Any) -> None:
    what = {"renew": "ttl"}.get(option, option)
    with pytest.raises(ValueError, match=rf"{what}.* is .* at most 3153600000 seconds"):
        DURATIONS[option](value)


@pytest.mark.parametrize("value", TOO_LONG, ids=repr)
@pytest.mark.parametrize("key", SETTINGS)
def test_each_setting_refuses_a_duration_that_is_too_long(
    key: str, value: Any, settings: Any
) -> None:
    entry = {"OPTIONS": {key: value}} if key.islower() else {key: value}
    settings.DLOCKS = {"default": {"BACKEND": conf.LOCAL_BACKEND, **entry}}
    with pytest.raises(InvalidLockBackend, match=rf"'{key}'\].* is .* at most \d+ seconds"):
        conf.alias_options("default")


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e308], ids=repr)
@pytest.mark.parametrize(("backend", "key"), [(it, key) for it in ALIASES for key in ALIASES[it]])
def test_each_option_of_a_backend_refuses_a_duration_that_is_too_long(
    backend: str, key: str, value: Any, settings: Any
) -> None:
    name = {"zookeeper": "ZooKeeper"}.get(backend, backend.capitalize())
    path = f"django_dlock.backends.{backend}.{name}Backend"
    location = [f"redis://127.0.0.1:{port}" for port in (1, 2, 3)]
    if backend != "redlock":
        location = "127.0.0.1:1" if backend == "zookeeper" else None
    entry = {"BACKEND": path, "LOCATION": location, "OPTIONS": {key: value}}
    settings.DLOCKS = {"default": entry}
    with pytest.raises(InvalidLockBackend, match=rf"\['{key}'\] is"):
        locks["default"]


def test_the_database_backend_says_that_the_app_is_not_installed() -> None:
    code = (
        "import django; from django.conf import settings; "
        "database = {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}; "
        "settings.configure(DATABASES={'default': database}); django.setup(); "
        "from django_dlock import Lock; Lock('it').acquire()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("add it to INSTALLED_APPS, and run migrate")


@pytest.mark.parametrize(
    ("backend", "location"),
    [
        (RedisBackend, "redis://127.0.0.1:1"),
        (DatabaseBackend, None),
        (EtcdBackend, "http://127.0.0.1:1"),
        (ZooKeeperBackend, "127.0.0.1:1"),
        (RedlockBackend, tuple(f"redis://127.0.0.1:{port}" for port in (1, 2, 3))),
    ],
)
def test_a_subclass_may_add_options_to_the_table_of_its_backend(
    backend: Any, location: Any
) -> None:
    table = make_dataclass(
        "Wider",
        [("region", str, option(text(), "where it is", "eu"))],
        bases=(backend.own_options,),
        frozen=True,
        kw_only=True,
    )
    wider = type("Wider", (backend,), {"own_options": table})
    options = AliasOptions("default", "wider", location=location, options={"region": "us"})
    assert wider.problems(options) == []
    made = wider(options)
    made.close()
    assert wider.warnings(options) == []
