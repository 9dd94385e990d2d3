"""Names of locks, and what their holders say of themselves, on local, SQLite and Redis."""

from __future__ import annotations

import io
import json
import logging
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from hypothesis import example, given
from hypothesis import strategies as some
from pytest_django.plugin import DjangoDbBlocker

from django_dlock import Lock, LockNotAcquired, locks
from django_dlock.core import watchdog
from django_dlock.log import logger
from django_dlock.text.names import check_name
from tests.fuzz.test_texts import is_safe
from tests.support import databases
from tests.support.aliases import configured
from tests.support.fuzzing import examples, json_values, texts

STORES = ("local", "sqlite", "redis")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """The default alias is on this store."""
    kind: str = request.param
    entries: dict[str, dict[str, Any]] = {
        "local": {"BACKEND": "django_dlock.backends.local.LocalBackend"},
        "sqlite": {
            "BACKEND": "django_dlock.backends.database.DatabaseBackend",
            "OPTIONS": {"database": "file"},
        },
        "redis": {"BACKEND": "django_dlock.backends.redis.RedisBackend", "KEY_PREFIX": "fuzz"},
    }
    entry = {**entries[kind], "WAIT": 0}
    if kind == "redis":
        entry["LOCATION"] = request.getfixturevalue("redis_server").url
    with tempfile.TemporaryDirectory(prefix="dlock-fuzz-") as folder:
        file = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(Path(folder) / "db.sqlite3")}
        with (
            databases.added("file", file),
            django_db_blocker.unblock(),
            configured({"default": entry}),
        ):
            yield kind
            watchdog.shutdown()
            locks.reset()


def like(name: str) -> list[str]:
    """Other names that a store might take for this one."""
    others = (
        *(name + " ", " " + name, name.upper(), name.lower(), name.swapcase(), name + "\u200b"),
        *(unicodedata.normalize(form, name) for form in ("NFC", "NFD", "NFKC")),
        *(name.replace("%", "_"), name.replace("*", "x"), name + "*", name[:-1], name * 2),
        *(f"{name}:", f"{name}/", f"{name}}}", f"{{{name}}}", name.encode().hex()),
    )
    return [other for other in dict.fromkeys(others) if other != name and is_name(other)]


def is_name(text: str) -> bool:
    try:
        check_name(text)
    except ValueError:
        return False
    return True


def listed(output: str, **options: Any) -> str:
    out = io.StringIO()
    call_command("list_locks", format=output, stdout=out, **options)
    return out.getvalue()


@examples(25)
@given(texts(300), some.randoms(use_true_random=False))
@example("", None)
@example("a" * 255, None)
@example("🦊" * 255, None)
@example("a" * 256, None)
@example("{a}", None)
@example("a*b?[c]", None)
@example("%_\\", None)
@example("\u202eabc", None)
@example("e\u0301", None)
@example("I", None)
@example("ß", None)
@example("a ", None)
def test_a_name_is_refused_or_means_one_lock(store: str, name: str, random: Any) -> None:
    if not is_name(name):
        with pytest.raises(ValueError, match="lock's name must") as refusal:
            Lock(name)
        assert is_safe(str(refusal.value))
        return
    with Lock(name) as lock:
        others = like(name)
        for other in random.sample(others, min(3, len(others))) if random else others:
            assert locks["default"].get(other) is None
            second = Lock(other, bound=False)
            assert second.acquire(blocking=False), other
            second.release()
        with pytest.raises(LockNotAcquired) as refusal:
            Lock(name, bound=False, reentrant=False).__enter__()
        assert is_safe(str(refusal.value))
        info = locks["default"].get(name)
        assert info is not None
        assert (info.name, info.owner) == (name, lock.owner)
        (told,) = [each for each in json.loads(listed("json")) if each["owner"] == lock.owner]
        assert told["name"] == name
        assert is_safe(listed("text").replace("\n", ""))
    assert locks["default"].get(name) is None


@examples(20)
@given(texts(40), texts(40), json_values())
@example("/a\0\x1b[2J\u202e\ud800", "\ud800", None)
@example("<script>", "'", "x" * 2_000)
def test_what_a_holder_says_of_itself_is_exact_in_json_and_safe_in_text(
    store: str, path: str, task: str, note: Any
) -> None:
    facts = {"path": path, "task_name": task, "note": json.dumps(note)}
    with Lock("it", metadata=facts) as lock:
        info = locks["default"].get("it")
        assert info is not None
        assert info.metadata == facts
        (told,) = [each for each in json.loads(listed("json")) if each["owner"] == lock.owner]
        assert told["holder"]["path"] == path
        assert told["holder"]["task_name"] == task
        for shown in (listed("text"), listed("text", waiters=True)):
            assert is_safe(shown.replace("\n", ""))
        with pytest.raises(LockNotAcquired) as refusal:
            Lock("it", bound=False).__enter__()
        assert is_safe(str(refusal.value))


@examples(40)
@given(texts(300))
def test_the_log_has_one_line_for_a_refused_name(name: str) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    target = logging.getLogger("django_dlock")
    target.addHandler(handler)
    try:
        check_name(name)
    except ValueError as error:
        logger.warning("%s: %r", error, name)
        assert [is_safe(line) for line in lines] == [True]
    finally:
        target.removeHandler(handler)
