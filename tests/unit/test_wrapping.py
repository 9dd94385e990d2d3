"""Text that is wrapped to a terminal: a name, key, path or id is never broken."""

from __future__ import annotations

import io

import pytest
from django.core.management import call_command

from django_dlock import locks
from django_dlock.management.commands import diagnose_locks
from django_dlock.management.diagnosis import Finding
from django_dlock.management.wrapping import wrapped

LOCAL = "django_dlock.backends.local.LocalBackend"
TEXT = (
    "The server's clock of 'order 4711:eu west' refuses DLOCKS['default']['OPTIONS'] and "
    '"/srv/my files/db.sqlite3"; run manage.py migrate django_dlock for '
    "shop.tasks.orders.charge_customer_of_last_month[9f42ab1c-1111-4222-8333-444455556666]."
)
WHOLE = ("'order 4711:eu west'", "DLOCKS['default']['OPTIONS']", '"/srv/my files/db.sqlite3";')


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [20, 40, 80])
def test_lines_break_at_spaces_between_whole_words(width):
    lines = list(wrapped(TEXT, width, first="* ", indent="  "))
    assert lines[0].startswith("* The server's")
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join([lines[0], *(line[2:] for line in lines[1:])]) == f"* {TEXT}"
    for whole in WHOLE:
        assert sum(whole in line for line in lines) == 1
    # Only a line with one word in it is too long.
    assert all(len(line) <= width or line[2:].rstrip(";.") in TEXT for line in lines)
    assert any(line.strip().endswith("-444455556666].") for line in lines)


def test_without_a_width_it_is_one_line():
    assert list(wrapped(TEXT, None, first="* ", indent="  ")) == [f"* {TEXT}"]


def test_colours_take_no_room():
    first = "\x1b[31;1merror\x1b[0m "
    assert list(wrapped("a b", 9, first=first)) == [f"{first}a b"]
    assert list(wrapped("a bc", 9, first=first)) == [f"{first}a", "bc"]


@pytest.fixture
def findings(settings, monkeypatch):
    settings.DLOCKS = {"default": {"BACKEND": LOCAL}}
    locks.reset()
    found = [Finding("default", "error", "answer", TEXT, f"Correct it: {TEXT}")]
    monkeypatch.setattr(diagnose_locks, "diagnose_alias", lambda alias, read_only: found)
    yield
    locks.reset()


@pytest.mark.usefixtures("findings")
@pytest.mark.parametrize(("width", "indent"), [(40, 4), (80, 24), (160, 24)])
def test_a_diagnosis_fits_the_terminal(monkeypatch, width, indent):
    monkeypatch.setenv("COLUMNS", str(width))
    out = Terminal()
    with pytest.raises(diagnose_locks.CommandError):
        call_command("diagnose_locks", using="default", stdout=out, no_color=True)
    lines = out.getvalue().splitlines()[1:]
    for whole in WHOLE:
        assert sum(whole in line for line in lines) == 2
    for line in lines[1:]:
        assert line.startswith(" " * indent)
        assert len(line) <= width or " " not in line.strip()
    told = " ".join(line.strip() for line in lines)
    assert " ".join(told.split()) == " ".join(f"error answer {TEXT} Correct it: {TEXT}".split())


@pytest.mark.usefixtures("findings")
def test_a_pipe_gets_each_finding_in_one_line():
    out = io.StringIO()
    with pytest.raises(diagnose_locks.CommandError):
        call_command("diagnose_locks", using="default", stdout=out)
    assert out.getvalue().splitlines()[1] == f"  error    answer       {TEXT}"
