"""``LockedCommand`` as run by cron: processes, exit codes and their output."""

from __future__ import annotations

import io
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import BaseCommand

from django_dlock import Lock, LockNotAcquired, locks
from django_dlock.management import LockedCommand
from testproject.servers import RedisServer

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60
NAME = "nightly.management.commands.import_feed"

# A new process may take long to connect, and makes a single attempt.
SETTINGS = """
import os
SECRET_KEY = "x"
INSTALLED_APPS = ["django_dlock", "nightly"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "cron.sqlite3"}}
DLOCKS = {"default": {
    "BACKEND": "django_dlock.backends.redis.RedisBackend",
    "LOCATION": os.environ["LOCKS"],
    "KEY_PREFIX": os.environ["PREFIX"],
    "OPTIONS": {"command_timeout": 10.0},
}}
"""

COMMAND = """
import sys
from django_dlock.management import LockedCommand

class Command(LockedCommand):
    def add_arguments(self, parser):
        parser.add_argument("do", choices=["end", "fail", "check"])

    def handle(self, **options):
        self.stdout.write("begun")
        self.stdout.flush()
        sys.stdin.readline()
        if options["do"] == "fail":
            raise ZeroDivisionError
        self.lock.check()
        self.stdout.write("done")
"""


class Cron:
    """Starts commands as cron would."""

    def __init__(self, directory: Path, redis: str) -> None:
        self.directory = directory
        self.prefix = f"cron-{secrets.token_hex(4)}"
        self.env = {
            "PYTHONPATH": f"{directory}:{ROOT}",
            "DJANGO_SETTINGS_MODULE": "cron_settings",
            "LOCKS": redis,
            "PREFIX": self.prefix,
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [sys.executable, "-m", "django", "import_feed", *arguments],
            cwd=self.directory,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(started)
        return started

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """A run whose ``handle`` has begun and waits for a line of input."""
        run = self.start(*arguments)
        assert run.stdout is not None
        assert run.stdout.readline() == "begun\n"
        return run

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code and output of a run that need not wait."""
        return end(self.start(*arguments))


def end(run: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = run.communicate("\n", timeout=PATIENCE)
    return run.returncode, out, err


@pytest.fixture
def cron(redis_server: RedisServer, tmp_path: Path, settings: Any) -> Iterator[Cron]:
    commands = tmp_path / "nightly" / "management" / "commands"
    commands.mkdir(parents=True)
    (commands / "import_feed.py").write_text(COMMAND)
    (tmp_path / "nightly" / "__init__.py").touch()
    (tmp_path / "cron_settings.py").write_text(SETTINGS)
    cron = Cron(tmp_path, redis_server.url)
    # To see the same locks in this process.
    settings.DLOCKS = {
        "default": {
            "BACKEND": "django_dlock.backends.redis.RedisBackend",
            "LOCATION": redis_server.url,
            "KEY_PREFIX": cron.prefix,
            "OPTIONS": {"command_timeout": 10.0},
        }
    }
    yield cron
    for run in cron.started:
        if run.poll() is None:
            run.kill()
        run.communicate()


def test_a_single_run_does_its_work(cron: Cron) -> None:
    assert cron.run("end") == (0, "begun\ndone\n", "")
    assert not Lock(NAME).locked()


def test_a_second_run_ends_with_one_line_and_success(cron: Cron) -> None:
    first = cron.begin("end")
    code, out, err = cron.run("end")
    assert (code, out) == (0, "")
    assert err.startswith("Not run: ")
    assert NAME in err
    assert err.count("\n") == 1
    assert cron.run("end", "--verbosity", "0") == (0, "", "")
    assert end(first) == (0, "done\n", "")


def test_the_exit_code_of_a_second_run_can_be_chosen(cron: Cron) -> None:
    first = cron.begin("end")
    code, out, err = cron.run("end", "--contended-exit-code", "9")
    assert (code, out) == (9, "")
    assert err.startswith("CommandError: Not run: ")
    assert err.count("\n") == 1
    assert end(first)[0] == 0


@pytest.mark.parametrize("wait", ["-1", "nan", "inf"])
def test_an_impossible_wait_is_a_usage_error(cron: Cron, wait: str) -> None:
    code, out, err = cron.run("end", f"--lock-wait={wait}")
    assert (code, out) == (2, "")
    assert err.startswith(
        f"CommandError: Not run: --lock-wait is {float(wait)}; it must be at least 0"
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize("exit_code", ["-1", "256"])
def test_an_impossible_exit_code_is_a_usage_error(cron: Cron, exit_code: str) -> None:
    code, out, err = cron.run("end", f"--contended-exit-code={exit_code}")
    assert (code, out) == (2, "")
    told = f"--contended-exit-code is {exit_code}; it must be from 0 to 255"
    assert err == f"CommandError: Not run: {told}\n"


def test_a_second_run_may_wait_for_the_first(cron: Cron) -> None:
    first = cron.begin("end")
    second = cron.start("end", "--lock-wait", str(PATIENCE))
    while not locks["default"].list()[0].waiting:
        assert second.poll() is None
    assert end(first)[0] == 0
    assert end(second) == (0, "begun\ndone\n", "")


def test_sigterm_releases_the_lock(cron: Cron) -> None:
    run = cron.begin("end")
    run.send_signal(signal.SIGTERM)
    assert run.wait(PATIENCE) == 128 + signal.SIGTERM
    assert not Lock(NAME).locked()


def test_a_lost_lock_is_a_failure_in_one_line(cron: Cron) -> None:
    run = cron.begin("end")
    (held,) = locks["default"].list()
    assert locks["default"].break_(held.name, owner=held.owner)
    code, _out, err = end(run)
    assert code == 1
    assert "CommandError: The lock was lost during the run: The lease is lost: broken" in err
    assert "Traceback" not in err


def test_an_error_of_the_work_is_reported_as_by_django(cron: Cron) -> None:
    code, _out, err = cron.run("fail")
    assert code == 1
    assert err.strip().endswith("ZeroDivisionError")
    assert not Lock(NAME).locked()


def test_without_its_backend_nothing_is_run(cron: Cron) -> None:
    cron.env["LOCKS"] = "redis://127.0.0.1:1/0"
    code, out, err = cron.run("end")
    assert (code, out) == (os.EX_TEMPFAIL, "")
    assert err.startswith("CommandError: Not run: ")
    assert err.count("\n") == 1


def test_a_refusal_is_a_failure_because_another_run_would_be_refused_too(cron: Cron) -> None:
    cron.env["LOCKS"] = cron.env["LOCKS"].replace("redis://", "redis://nobody:wrong@")
    code, out, err = cron.run("end")
    assert (code, out) == (1, "")
    assert err.startswith("CommandError: Not run: ")
    assert "refused" in err
    assert err.count("\n") == 1


# -- in code -------------------------------------------------------------------------------


@pytest.fixture
def local(settings: Any) -> None:
    settings.DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}


def command(run: Callable[[LockedCommand], object], **attributes: Any) -> LockedCommand:
    class Command(LockedCommand):
        requires_system_checks = []

        def add_arguments(self, parser: Any) -> None:
            parser.add_argument("--feed", default="news")

        def handle(self, **options: Any) -> None:
            assert "lock_wait" not in options
            run(self)

    for name, value in attributes.items():
        setattr(Command, name, value)
    return Command()


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize(
    ("lock_key", "name"),
    [
        ("import:{feed}", "import:news"),
        (staticmethod(lambda feed, **_: f"by hand: {feed}"), "by hand: news"),
        (None, __name__),
    ],
)
def test_the_lock_is_named_by_the_options(lock_key: Any, name: str) -> None:
    seen: list[str] = []
    call_command(command(lambda run: seen.append(run.lock.name), lock_key=lock_key))
    assert seen == [name]


@pytest.mark.usefixtures("local")
def test_names_of_options_make_a_digest() -> None:
    seen: list[str] = []
    made = command(lambda run: seen.append(run.lock.name), lock_key=["feed"])
    call_command(made, feed="news")
    call_command(made, feed="sports")
    assert seen[0].startswith(__name__)
    assert seen[0] != seen[1]


@pytest.mark.usefixtures("local")
def test_a_key_with_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="'stream', which does not exist"):
        call_command(command(print, lock_key="import:{stream}"))


@pytest.mark.usefixtures("local")
def test_call_command_of_a_refused_run_returns_or_raises_according_to_its_exit_code() -> None:
    err = io.StringIO()
    with Lock("import:news", bound=False):
        made = command(pytest.fail, lock_key="import:{feed}")
        assert call_command(made, stderr=err) is None
        assert err.getvalue().startswith("Not run: ")
        with pytest.raises(CommandError, match="Not run") as caught:
            call_command(made, contended_exit_code=3)
    assert caught.value.returncode == 3


@pytest.mark.usefixtures("local")
def test_wrong_settings_are_reported_in_one_line() -> None:
    with pytest.raises(CommandError, match="Not run: There is no lock alias 'nowhere'"):
        call_command(command(pytest.fail, lock_using="nowhere"))


@pytest.mark.usefixtures("local")
@pytest.mark.parametrize("attribute", ["contended_exit_code", "unavailable_exit_code"])
def test_an_impossible_exit_code_of_the_class_is_an_error(attribute: str) -> None:
    with pytest.raises(ValueError, match=f"^{attribute} is 300; it must be from 0 to 255"):
        call_command(command(pytest.fail, **{attribute: 300}))


@pytest.mark.usefixtures("local")
def test_contention_inside_the_work_is_not_contention_of_the_command() -> None:
    def work(_run: LockedCommand) -> None:
        with Lock("other", bound=False, wait=0):
            pass

    with Lock("other", bound=False), pytest.raises(LockNotAcquired):
        call_command(command(work))


@pytest.mark.usefixtures("local")
def test_it_is_a_mixin_for_other_base_commands() -> None:
    class Ours(BaseCommand):
        requires_system_checks = []
        ran = 0

        def handle(self, **_: Any) -> None:
            type(self).ran += 1

    class Both(LockedCommand, Ours):
        lock_key = "both"

    with Lock("both", bound=False):
        call_command(Both(), verbosity=0)
    assert Both.ran == 0
    call_command(Both())
    assert Both.ran == 1


@pytest.mark.usefixtures("local")
def test_an_existing_handler_of_sigterm_is_kept() -> None:
    def ours(*_: Any) -> None: ...

    seen: list[Any] = []
    before = signal.signal(signal.SIGTERM, ours)
    try:
        call_command(command(lambda _run: seen.append(signal.getsignal(signal.SIGTERM))))
    finally:
        signal.signal(signal.SIGTERM, before)
    call_command(command(lambda _run: seen.append(signal.getsignal(signal.SIGTERM))))
    assert seen[0] is ours
    assert seen[1] not in (ours, signal.SIG_DFL)
    assert signal.getsignal(signal.SIGTERM) is before
