"""``local_locks``: a project's tests need no server, and leave nothing behind for each other."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import unittest
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import TestCase, override_settings

from django_dlock import Lock, LockNotAcquired, conf, locks, signals
from django_dlock.backends.local import LocalBackend
from django_dlock.core import dispatch
from django_dlock.exceptions import InvalidLockBackend
from django_dlock.testing import local_locks

NOBODY = "redis://127.0.0.1:1/0"
"""A server that would not answer."""


@pytest.fixture(autouse=True)
def on_redis(settings: Any) -> None:
    """Production settings whose Redis does not exist."""
    settings.DLOCKS = {
        "default": {
            "BACKEND": "django_dlock.backends.redis.RedisBackend",
            "LOCATION": NOBODY,
            "KEY_PREFIX": "shop",
            "TTL": 60,
            "OPTIONS": {"command_timeout": 0.5, "max_connections": 8},
        },
        "other": {"BACKEND": "django_dlock.backends.redis.RedisBackend", "LOCATION": NOBODY},
    }


def test_every_alias_is_local_and_restored_afterwards() -> None:
    before = locks["default"]
    with local_locks():
        assert {alias: type(locks[alias]) for alias in locks} == {
            "default": LocalBackend,
            "other": LocalBackend,
        }
        assert conf.problems() == []
        with Lock("a"), Lock("a", using="other"):
            pass
    assert type(locks["default"]) is type(before)


def test_durations_of_the_settings_are_kept_and_can_be_overridden() -> None:
    with local_locks():
        options = locks["default"].options
        assert (options.ttl, options.command_timeout, options.wait) == (60, 0.5, 10)
    with local_locks(WAIT=0, TTL=5):
        options = locks["other"].options
        assert (options.wait, options.ttl) == (0, 5)


@override_settings(DLOCKS=None)
def test_settings_without_locks_have_a_default_alias() -> None:
    with local_locks(), Lock("a"):
        assert list(locks) == ["default"]


def test_locks_left_held_are_released_silently(caplog: pytest.LogCaptureFixture) -> None:
    with local_locks(), caplog.at_level(logging.INFO, "django_dlock"):
        left = Lock("a")
        assert left.acquire()
    assert not left.held
    assert not left.lost
    # As a late ``tearDown`` may do.
    left.release()
    dispatch.flush()
    # Locks of other tests may be collected during this one, with a warning.
    assert [it for it in caplog.records if getattr(it, "lock_name", None) == "a"] == []
    with local_locks(WAIT=0), Lock("a"):
        pass


def test_a_thread_that_waits_at_the_end_of_a_test_continues() -> None:
    done, waits = [], threading.Event()

    def tell(**_: Any) -> None:
        waits.set()

    def wait() -> None:
        with Lock("a", wait=None):
            done.append(1)

    signals.contended.connect(tell)
    with local_locks():
        left = Lock("a", bound=False)
        assert left.acquire()
        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        assert waits.wait(20)
    waiter.join(20)
    assert done == [1]


def test_an_exception_also_restores_the_aliases() -> None:
    with pytest.raises(ZeroDivisionError), local_locks():
        raise ZeroDivisionError
    assert not isinstance(locks["default"], LocalBackend)


@local_locks(WAIT=0)
def test_a_function_can_be_decorated() -> None:
    held = Lock("a", bound=False)
    held.acquire()
    with pytest.raises(LockNotAcquired), Lock("a"):
        pass


def test_without_parentheses_the_error_says_how_to_write_it() -> None:
    with pytest.raises(TypeError, match=r"it needs parentheses: @local_locks\(\)"):

        @local_locks  # type: ignore[arg-type]
        def test_it() -> None: ...


def test_an_unknown_key_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"does not take 'WIAT'; it takes \[.*'WAIT'\]"):
        local_locks(WIAT=0)


def test_a_wrong_value_is_one_error_at_the_start_and_the_settings_are_restored() -> None:
    before = conf.alias_options("default")
    with pytest.raises(InvalidLockBackend, match="TTL") as refused, local_locks(TTL="long"):
        pytest.fail("It has started.")
    assert refused.value.__context__ is None
    assert conf.alias_options("default") == before


def run(case: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def test_each_test_of_a_case_starts_without_locks() -> None:
    @local_locks(WAIT=0)
    class Case(unittest.TestCase):
        left: Lock

        def setUp(self) -> None:
            # The previous test has left it held.
            type(self).left = Lock("a", bound=False)
            assert self.left.acquire()

        def test_one(self) -> None:
            assert not Lock("a", bound=False).acquire()

        test_two = test_one

    result = run(Case)
    assert result.testsRun == 2
    assert result.wasSuccessful(), result.errors + result.failures


@pytest.mark.django_db
def test_a_lock_until_the_commit_ends_with_the_callbacks_of_a_test_case() -> None:
    """As docs/howto/test-locks.md says: in a ``TestCase`` nothing is committed."""

    @local_locks(WAIT=0)
    class Case(TestCase):
        def test_it(self) -> None:
            with transaction.atomic(), Lock("a", hold_until="commit", bound=False):
                pass
            assert Lock("a").locked()

        def test_it_with_callbacks(self) -> None:
            until_commit = Lock("a", hold_until="commit", bound=False)
            with self.captureOnCommitCallbacks(execute=True), transaction.atomic(), until_commit:
                pass
            assert not Lock("a").locked()

    result = run(Case)
    assert result.testsRun == 2
    assert result.wasSuccessful(), result.errors + result.failures


def test_a_project_without_pytest_can_use_it() -> None:
    script = (
        "import sys; sys.modules['pytest'] = None; from django_dlock.testing import local_locks"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# -- the plugin ----------------------------------------------------------------------------

SETTINGS = f"""
SECRET_KEY = "x"
INSTALLED_APPS = ["django_dlock"]
DLOCKS = {{
    "default": {{
        "BACKEND": "django_dlock.backends.redis.RedisBackend", "LOCATION": "{NOBODY}",
    }}
}}
"""

CONFTEST = 'pytest_plugins = ["django_dlock.testing.pytest"]\n'

TESTS = """
import pytest
from django_dlock import Lock, LockNotAcquired

left = []

@pytest.mark.parametrize("number", [1, 2])
def test_begins_with_nothing_held(number, local_locks):
    assert local_locks["default"].list() == []
    lock = Lock("a", bound=False)
    assert lock.acquire()
    left.append(lock)
    assert [info.name for info in local_locks["default"].list()] == ["a"]
"""

FOR_ALL = """
from django_dlock import Lock

def test_needs_no_server():
    with Lock("a"):
        pass
"""


def pytest_in(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "shop_settings.py").write_text(SETTINGS)
    command = [sys.executable, "-m", "pytest", "-q", "--ds", "shop_settings", *options]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=directory,
        env={"PYTHONPATH": f"{directory}:{Path(__file__).resolve().parents[2]}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_fixture_empties_the_locks_after_each_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_shop.py").write_text(TESTS)
    done = pytest_in(tmp_path)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_one_line_of_configuration_is_enough_for_all_tests(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nusefixtures = local_locks\n")
    (tmp_path / "test_shop.py").write_text(FOR_ALL)
    done = pytest_in(tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
