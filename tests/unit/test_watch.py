"""``list_locks --watch``: what it shows, and how it ends."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from django.core.management import CommandError, call_command

from django_dlock import locks
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import LeaseRequest
from django_dlock.management import watch
from django_dlock.management.screen import CLOSE, HOME, OPEN

LOCAL = "django_dlock.backends.local.LocalBackend"


class Changing(LocalBackend):
    """Answers unless it is down."""

    down = False

    def page(self, query, **bounds):
        if Changing.down:
            raise BackendUnavailable("nobody\x1b answers", "", self.alias)
        return super().page(query, **bounds)


@pytest.fixture(autouse=True)
def aliases(settings):
    settings.DLOCKS = {"one": {"BACKEND": LOCAL}, "two": {"BACKEND": f"{__name__}.Changing"}}
    Changing.down = False
    locks.reset()
    yield
    locks.reset()


@pytest.fixture
def turns(monkeypatch):
    """What happens after each interval; after the last one, somebody presses Ctrl-C."""
    left = []

    def sleep(seconds):
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    # No time passes: each pause of the watch runs the next step of the test.
    monkeypatch.setattr(watch, "time", SimpleNamespace(**vars(watch.time)))
    monkeypatch.setattr(watch.time, "sleep", sleep)
    return left


def hold(name, alias="one", **facts):
    backend = locks[alias]
    request = LeaseRequest(name=name, owner=name, ttl=30, **facts)
    return backend.acquire(request, deadline=backend.call_deadline())


def go_down():
    Changing.down = True


def come_back():
    Changing.down = False


class Terminal(io.StringIO):
    def isatty(self):
        return True

    @property
    def frames(self):
        """The successive contents of the screen."""
        text = self.getvalue().removeprefix(OPEN).removesuffix(CLOSE)
        return [frame.replace("\x1b[K", "").replace("\x1b[J", "") for frame in text.split(HOME)[1:]]


def run(out=None, **options):
    out = out or io.StringIO()
    err = io.StringIO()
    call_command("list_locks", stdout=out, stderr=err, no_color=True, **options)
    return SimpleNamespace(out=out.getvalue(), err=err.getvalue())


def test_a_pipe_gets_one_line_of_json_per_interval(turns):
    turns.append(lambda: hold("b", alias="two"))
    hold("a")
    lines = run(watch=1.0, format="json").out.splitlines()
    assert [[lock["name"] for lock in json.loads(line)] for line in lines] == [["a"], ["a", "b"]]


def test_an_alias_that_goes_down_is_reported_once_and_the_watch_goes_on(turns):
    turns += [go_down, lambda: None, come_back]
    hold("a")
    hold("b", alias="two")
    told = run(watch=1.0, format="json")
    lines = [json.loads(line) for line in told.out.splitlines()]
    names = [[lock.get("name", f"error of {lock['alias']}") for lock in line] for line in lines]
    assert names == [["a", "b"], ["a", "error of two"], ["a", "error of two"], ["a", "b"]]
    assert "answers" in lines[1][1]["error"]
    down, again = told.err.splitlines()
    assert "Alias 'two': nobody\\x1b answers" in down
    assert "Alias 'two' answers again, after" in again


def test_a_pipe_gets_one_table_per_interval(turns):
    turns.append(lambda: None)
    hold("a")
    out = run(watch=1.0).out
    assert out.count("1 lock at ") == 2
    assert out.count("NAME ") == 2


def test_a_pipe_gets_a_line_for_an_alias_that_is_down_or_cannot_list(turns, monkeypatch):
    turns += [go_down]
    hold("a")
    told = run(watch=1.0)
    first, second = told.out.split("1 lock at ")[1:]
    assert "DOWN" not in first
    assert second.splitlines()[1].startswith("DOWN: alias 'two' since ")
    assert "NAME " in second
    come_back()
    monkeypatch.setattr(Changing, "capabilities", frozenset())
    told = run(watch=1.0)
    assert "DOWN: alias 'two' since " in told.out
    assert told.out.splitlines()[1].endswith(": Alias 'two' cannot list its locks.")
    assert "Alias 'two' cannot list its locks." in told.err


def test_a_terminal_is_redrawn_and_given_back(turns, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "20")
    turns.append(lambda: hold("b"))
    hold("a")
    terminal = Terminal()
    run(terminal, watch=1.0)
    assert terminal.getvalue().startswith(OPEN)
    assert terminal.getvalue().endswith(CLOSE)
    first, second = terminal.frames
    assert first.startswith("1 lock at ")
    assert second.startswith("2 locks at ")
    # Clearing it would make it flicker.
    assert "\x1b[2J" not in terminal.getvalue()


def test_a_terminal_shows_since_when_an_alias_is_down(turns, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    turns += [go_down, come_back]
    hold("a")
    terminal = Terminal()
    run(terminal, watch=1.0)
    before, down, after = terminal.frames
    assert "DOWN" not in before
    assert "DOWN: alias 'two' since " in down
    assert "nobody\\x1b answers" in down
    assert "a " in down.splitlines()[-1]
    assert "DOWN" not in after


def test_a_terminal_shows_what_fits_and_how_many_more_there_are(turns, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "10")
    for number in range(40):
        hold(f"lock:{number:02}{'x' * 100}")
    asked = []
    original = LocalBackend.page

    def spy(self, query, **bounds):
        asked.append(bounds.get("limit"))
        return original(self, query, **bounds)

    monkeypatch.setattr(LocalBackend, "page", spy)
    terminal = Terminal()
    run(terminal, watch=1.0)
    (frame,) = terminal.frames
    lines = frame.split("\r\n")
    assert len(lines) == 10
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "... and 34 more; --name shows fewer"
    # Many thousands are not sent for a screen of ten lines.
    assert asked == [10, 10]


def test_a_pattern_selects_and_nothing_found_is_reported(turns):
    hold("a")
    assert "No held lock has a name that matches 'b*'." in run(watch=1.0, name="b*").out
    assert "0 locks at " in run(watch=1.0, name="b*").out


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_wrong_interval_is_wrong_usage(seconds):
    with pytest.raises(CommandError) as caught:
        run(watch=seconds)
    assert caught.value.returncode == 2
