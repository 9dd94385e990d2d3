"""What ``list_locks`` shows on terminals of all widths, under ``watch`` and on pipes."""

from __future__ import annotations

import datetime as dt
import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from django.core.management import call_command

from django_dlock import locks
from django_dlock.lease import HOLDING, LeaseInfo, LeaseRequest
from django_dlock.management.table import by_trouble, lease_table
from django_dlock.process import current

LOCAL = "django_dlock.backends.local.LocalBackend"
NOW = dt.datetime(2026, 11, 1, tzinfo=dt.timezone.utc)
ID = "9f42ab1c-1111-4222-8333-444455556666"
TASK = "shop.tasks.orders.charge_customer"
OF_TASK = {"task_name": TASK, "task_id": ID}


def process(host="worker-2.eu-central.example.org", pid=4711):
    return current()._replace(host=host, pid=pid)


def info(name="order:1", **facts):
    lease = LeaseInfo(
        name, "default", "held", "o", 1, NOW, 754.0, 30.0, 0, 0, process(), "alive", OF_TASK
    )
    return replace(lease, **facts)


MANY = [
    info("order:4711:ship-to-the-warehouse-in-rotterdam", waiting=3),
    info("view", metadata={"path": "/checkout/confirm/4711/"}, process=process("web-1", 12)),
    info("import:europe:2026-11", age=3.0),
]


def table(infos, width, **options):
    return list(lease_table(infos, width, **options))


@pytest.fixture
def aliases(settings):
    settings.DLOCKS = {"default": {"BACKEND": LOCAL}, "two": {"BACKEND": LOCAL}}
    locks.reset()
    yield
    locks.reset()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def ask(name, owner, alias="default", **facts):
    metadata = json.dumps(facts.pop("metadata", {}))
    store = locks[alias]
    request = LeaseRequest(name, owner, 30.0, metadata=metadata, **facts)
    store.acquire(request, deadline=store.call_deadline())


def run(out=None, **options):
    out = out or io.StringIO()
    call_command("list_locks", stdout=out, **options)
    return out.getvalue()


# -- widths --------------------------------------------------------------------------------------


def test_at_80_columns_the_task_is_readable_and_what_is_cut_is_marked():
    head, first, second, third, left_out = table(MANY, 80)
    assert head.split() == ["NAME", "STATE", "AGE", "WAITING", "HOLDER", "TASK"]
    assert ".charge_customer…" in first
    assert first.startswith("order:")
    assert "otterdam  " in first
    # The pid is what one looks for on the host.
    assert "…:4711 " in first
    assert "/4711/" in second
    assert "web-1:12 " in second
    assert third.startswith("import:")
    assert left_out == "Not shown at this width: TTL, ALIAS (all default)."
    assert max(map(len, (head, first, second, third))) <= 80


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160])
def test_no_line_is_longer_than_the_terminal(width):
    lines = table(MANY, width)
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:2] == ["NAME", "STATE"]
    assert "TASK" in lines[0]


def test_a_wider_terminal_shows_more():
    shown = [table(MANY, width)[1:4] for width in (40, 60, 80, 120, 160, 200)]
    sizes = [sum(len(line.replace(" ", "")) for line in lines) for lines in shown]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    whole = table(MANY, None)
    assert table(MANY, 300) == whole
    assert f"{TASK}[{ID}]" in whole[1]


def test_a_shortened_id_of_a_task_keeps_its_beginning():
    lines = table([info("a", process=process("web-1"))], 100)
    assert f"{TASK}[9f42ab1c…]" in lines[1]


def test_an_alias_that_differs_is_shown_before_the_others_are_left_out():
    found = [info("a"), info("b", alias="two")]
    assert "ALIAS" in table(found, 80)[0]
    assert table(found, 40)[3:] == ["Not shown at this width: WAITING,", "  HOLDER, TTL, ALIAS."]


def test_a_kind_that_is_not_held_is_the_state():
    parked = info("a", kind="parked", holder_state="unknown")
    assert table([parked], None)[1].split()[:2] == ["a", "parked"]


def test_of_a_damaged_entry_only_the_details_are_cut():
    broken = info("a", holder_state="silent", damaged=("metadata", "process", "acquired_at"))
    for width in (40, 60, 80):
        assert "silent, damaged…" in table([broken], width)[1]
    assert "silent, damaged: metadata process acquired_at" in table([broken], None)[1]


@pytest.mark.usefixtures("aliases")
def test_a_pipe_gets_all_columns_and_one_whole_line_for_each_lock():
    ask("invoice:" + "x" * 200, "o", metadata={"task_name": "t" * 200})
    ask("b", "p")
    head, first, second = run().splitlines()
    assert head.split()[-2:] == ["TTL", "ALIAS"]
    assert "x" * 200 in first
    assert "t" * 200 in first
    assert second.split()[0] == "b"


@pytest.mark.usefixtures("aliases")
def test_columns_of_the_environment_count_as_watch_sets_them(monkeypatch, tmp_path):
    ask("invoice:" + "x" * 200, "o", metadata={"task_name": "t" * 200})
    monkeypatch.setenv("COLUMNS", "90")
    lines = run(Terminal(), no_color=True).splitlines()
    assert max(map(len, lines)) == 90
    assert "…" in lines[1]
    path = tmp_path / "pipe"
    for columns, width in (("90", 90), ("0", None), ("x", None)):
        monkeypatch.setenv("COLUMNS", columns)
        with path.open("w", encoding="utf-8") as pipe:
            call_command("list_locks", stdout=pipe)
        lines = path.read_text(encoding="utf-8").splitlines()
        if width is None:
            assert "x" * 200 in lines[1]
        else:
            assert max(map(len, lines)) == 90
    # A program that reads it gets it whole.
    monkeypatch.setenv("COLUMNS", "90")
    assert "x" * 200 in run()


# -- what comes first ----------------------------------------------------------------------------


def test_what_needs_an_operator_comes_first_then_the_oldest():
    older = NOW - dt.timedelta(hours=1)
    found = [
        info("new"),
        info("old", acquired_at=older),
        info("late", renewals=1, granted_ttl=90.0),
        info("silent", holder_state="silent"),
        info("dead", holder_state="dead"),
        info("endless", ttl=None),
        info("damaged", damaged=("metadata",), acquired_at=older),
        info("stuck", holder_state="silent"),
    ]
    ordered = by_trouble(found, {("default", "stuck")})
    names = ["stuck", "damaged", "endless", "dead", "silent", "late", "old", "new"]
    assert [it.name for it in ordered] == names
    assert [it.name for it in by_trouble([*reversed(found)], {("default", "stuck")})] == names
    states = [line.split("  ")[1].strip() for line in _rows(ordered)]
    assert states[0] == "silent, deadlock"
    assert states[3:6] == ["dead", "silent", "alive, late"]


def _rows(infos):
    lines = table([replace(it, name=it.name[:5]) for it in infos], None, in_deadlock=_stuck(infos))
    return lines[1:]


def _stuck(infos):
    return {("default", it.name[:5]) for it in infos if it.name == "stuck"}


def test_colours_do_not_change_the_columns():
    found = [info("a", holder_state="dead"), info("b", holder_state="silent"), info("c")]
    style = SimpleNamespace(ERROR="<{}>".format, WARNING="({})".format)
    plain, coloured = table(found, 80), table(found, 80, style=style)
    assert "<dead>  " in coloured[1]
    assert "(silent)" in coloured[2]
    unpainted = [line.translate({ord(c): None for c in "<>"}) for line in coloured]
    assert unpainted[:2] == plain[:2]


# -- deadlocks -----------------------------------------------------------------------------------


@pytest.fixture
def deadlock(aliases):
    """The holder of a waits for b, and the holder of b, in the other alias, for a."""
    first, second = "1" * 32, "2" * 32
    ask("quiet", "3" * 32)
    ask("a", first, metadata={"task_name": "shop.charge", "task_id": "9f-42"})
    ask("b", second, alias="two", metadata={"path": "/pay/"})
    ask("b", "w1", alias="two", waits=True, metadata={HOLDING: first[:16]})
    ask("a", "w2", waits=True, metadata={HOLDING: second[:16]})


@pytest.mark.usefixtures("deadlock")
@pytest.mark.parametrize("options", [{}, {"waiters": True}, {"name": "a"}])
def test_a_deadlock_is_named_above_the_table(options):
    lines = run(**options).splitlines()
    deadlock = lines[0]
    assert deadlock.startswith("Deadlock: ")
    holds = "shop.charge[9f-42] holds"
    assert holds in deadlock
    assert re.search(r"and waits [\d.]+s for 'a' \(alias 'default'\)", deadlock)
    assert re.search(r"and waits [\d.]+s for 'b' \(alias 'two'\)", deadlock)
    assert deadlock.endswith('Stop one of them; see "Who blocks whom" in the admin.')
    assert lines[2].split()[:2] == ["a", "deadlock"]
    assert len([line for line in lines if line.startswith("Deadlock")]) == 1


@pytest.mark.usefixtures("deadlock")
def test_a_deadlock_of_other_locks_is_not_named():
    assert "eadlock" not in run(name="quiet")


@pytest.mark.usefixtures("deadlock")
def test_the_json_with_waiters_has_the_circle_of_each_lock():
    found = {
        lock["name"]: lock["deadlock"] for lock in json.loads(run(waiters=True, format="json"))
    }
    a, b = {"alias": "default", "name": "a"}, {"alias": "two", "name": "b"}
    assert found == {"quiet": None, "a": [a, b], "b": [b, a]}
    assert all("deadlock" not in lock for lock in json.loads(run(format="json")))


@pytest.mark.usefixtures("deadlock")
def test_a_deadlock_is_wrapped_without_breaking_a_name(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = run(Terminal(), no_color=True).splitlines()
    end = next(index for index, line in enumerate(lines) if line.startswith("NAME"))
    assert "shop.charge[9f-42]" in " ".join(lines[:end])
    assert max(map(len, lines)) <= 40


@pytest.mark.usefixtures("aliases")
def test_a_long_deadlock_and_many_waiters_are_bounded(monkeypatch):
    monkeypatch.setattr("django_dlock.management.deadlocks.LINKS", 2)
    owners = [str(number) * 32 for number in range(4)]
    for number, owner in enumerate(owners):
        ask(f"lock:{number}", owner)
    for number, owner in enumerate(owners):
        ask(f"lock:{(number + 1) % 4}", f"w{number}", waits=True, metadata={HOLDING: owner[:16]})
    told = run().splitlines()
    assert "; and 2 more. Stop one" in told[0]
    for number in range(21):
        ask("lock:0", f"v{number}", waits=True)
    assert run().splitlines()[1].startswith("There may be more: at most 100 locks of each alias")


@pytest.mark.usefixtures("aliases")
def test_without_waiters_nothing_more_is_asked(monkeypatch):
    ask("a", "o")
    monkeypatch.setattr("django_dlock.management.deadlocks.survey", None)
    assert run().splitlines()[1].startswith("a ")
