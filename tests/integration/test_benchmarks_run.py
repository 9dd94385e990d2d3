"""How benchmark rows run: by turns, with exact counts, and once completely."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from benchmarks import runner
from benchmarks.__main__ import _chosen
from benchmarks.beds import BEDS
from benchmarks.bench import Bench
from benchmarks.budgets import BUDGETS
from benchmarks.counting import Counted, CountingProxy, postgres_commands, redis_commands
from benchmarks.model import Metric, Readings, Row, Session, Subject, Unavailable
from benchmarks.parsers import PARSERS
from benchmarks.progress import Progress
from benchmarks.rows import MODULES, all_rows
from benchmarks.runner import FEWEST_PASSES, FEWEST_ROUNDS, run_row
from testproject.servers import RedisServer

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parent.parent.parent

# -- in turns -------------------------------------------------------------------------------


class Scripted(Session):
    def __init__(self, name: str, calls: list[str], rounds: Iterator[float]) -> None:
        self.name, self.calls, self.rounds = name, calls, rounds

    def once(self) -> Readings:
        return {"count": 7.0}

    def round(self) -> Readings:
        self.calls.append(self.name)
        return {"time": [next(self.rounds)]}


def scripted(name: str, calls: list[str], rounds: list[float]) -> Subject:
    @contextmanager
    def open_() -> Iterator[Session]:
        yield Scripted(name, calls, iter(rounds))
        calls.append(f"{name} closed")

    return Subject(name, "peer", "scripted", open_)


def unavailable(name: str) -> Subject:
    @contextmanager
    def open_() -> Iterator[Session]:
        raise Unavailable("not here")
        yield Session()

    return Subject(name, "peer", "not here", open_)


def run(*subjects: Subject, rounds: int = 2, passes: int = 1) -> tuple[dict[str, object], str]:
    metrics = (Metric("time", "s"), Metric("count"))
    row = Row("row", "A row", metrics, subjects, rounds=rounds, passes=passes)
    out = io.StringIO()
    outcome = run_row(row, rounds, Progress({"row": (row, rounds)}, quick=False, out=out))
    return dict(outcome.subjects), out.getvalue()


def test_subjects_take_turns_and_a_different_one_begins_each_round() -> None:
    calls: list[str] = []
    subjects = [scripted(name, calls, [1.0, 2.0]) for name in "abc"]
    results, said = run(*subjects)
    assert calls == ["a", "b", "c", "b", "c", "a", "c closed", "b closed", "a closed"]
    series = results["a"].series  # type: ignore[attr-defined]
    assert (series["time"].rounds, series["count"].rounds) == ([1.0, 2.0], [7.0])
    assert "[1/1] row: round 2 of 2, about" in said


def test_the_subjects_alternate_within_a_round() -> None:
    calls: list[str] = []
    results, _ = run(scripted("a", calls, [1.0, 9.0, 2.0, 8.0]), rounds=2, passes=2)
    assert results["a"].series["time"].rounds == [5.0, 5.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rounds", "passes", "seconds", "turns"),
    [
        (15, 1, 15.0, 15),
        (15, 1, 7.5, 8),
        (15, 1, 1.0, FEWEST_ROUNDS),
        (3, 1, 1.0, 3),
        (15, 16, 240.0, 15 * 16),
        (15, 16, 120.0, 15 * 8 + 1),
        (15, 16, 1.0, FEWEST_ROUNDS * FEWEST_PASSES),
    ],
)
def test_on_a_slow_machine_passes_or_rounds_are_left_out(
    monkeypatch: pytest.MonkeyPatch, rounds: int, passes: int, seconds: float, turns: int
) -> None:
    now = [0.0]

    class Slow(Session):
        def round(self) -> Readings:
            now[0] += 1.0
            return {"time": [1.0]}

    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    subject = Subject("slow", "ours", "", lambda: nullcontext(Slow()))
    row = Row("row", "A row", (Metric("time", "s"),), (subject,), rounds=rounds, passes=passes)
    quiet = Progress({"row": (row, rounds)}, quick=False, out=io.StringIO())
    outcome = run_row(row, rounds, quiet, seconds=seconds)
    assert (now[0], outcome.seconds) == (turns, turns)


def test_a_subject_that_cannot_take_part_is_reported_and_the_others_continue(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[str] = []
    # It fails in its second round.
    results, _ = run(
        unavailable("absent"), scripted("broken", calls, [1.0]), scripted("well", calls, [1.0, 2.0])
    )
    assert results["absent"].cannot == "not here"  # type: ignore[attr-defined]
    assert results["broken"].cannot == "StopIteration:"  # type: ignore[attr-defined]
    assert results["broken"].series == {}  # type: ignore[attr-defined]
    assert results["well"].series["time"].rounds == [1.0, 2.0]  # type: ignore[attr-defined]
    assert "StopIteration" in capsys.readouterr().err


def test_a_peer_that_fails_at_its_end_keeps_its_measurements(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def open_() -> Iterator[Session]:
        yield Scripted("clumsy", [], iter([1.0, 2.0]))
        raise RuntimeError("nothing to release")

    results, _ = run(Subject("clumsy", "peer", "", open_))
    assert results["clumsy"].series["time"].rounds == [1.0, 2.0]  # type: ignore[attr-defined]
    assert "nothing to release" in capsys.readouterr().err


# -- counting -------------------------------------------------------------------------------


def test_whole_commands_are_counted_and_the_rest_is_kept() -> None:
    ping, part = b"*1\r\n$4\r\nPING\r\n", b"*2\r\n$3\r\nGET\r\n$3\r\nna"
    assert redis_commands(ping + ping + part) == (2, part)
    assert redis_commands(part + b"m\r\n") == (1, b"")


def test_statements_are_counted_after_the_start_of_a_connection() -> None:
    encryption = b"\0\0\0\x08\x04\xd2\x16\x2f"
    query = b"Q\0\0\0\x0dSELECT 1\0"
    assert postgres_commands(encryption + query + query[:-1]) == (1, query[:-1])
    assert postgres_commands(b"P\0\0\0\x04" + b"E\0\0\0\x04" + b"S\0\0\0\x04") == (1, b"")


@pytest.fixture(scope="module")
def counted() -> Iterator[tuple[CountingProxy, redis.Redis]]:
    with (
        RedisServer() as server,
        CountingProxy(server.url) as proxy,
        redis.Redis.from_url(proxy.url) as client,
    ):
        client.ping()
        yield proxy, client


def passed(proxy: CountingProxy, talk: Callable[[], object]) -> Counted:
    before = proxy.total
    talk()
    after = proxy.total
    return Counted(after.round_trips - before.round_trips, after.commands - before.commands)


def test_a_pipeline_is_one_round_trip_of_many_commands(
    counted: tuple[CountingProxy, redis.Redis],
) -> None:
    proxy, client = counted

    def pipeline() -> None:
        with client.pipeline(transaction=False) as batch:
            batch.set("it", 1).get("it").delete("it").execute()

    assert passed(proxy, pipeline) == Counted(round_trips=1, commands=3)
    assert passed(proxy, lambda: (client.get("it"), client.get("it"))) == Counted(2, 2)


def test_a_script_counts_as_one_command(counted: tuple[CountingProxy, redis.Redis]) -> None:
    proxy, client = counted
    script = "redis.call('set', KEYS[1], 1) return redis.call('del', KEYS[1])"
    assert passed(proxy, lambda: client.eval(script, 1, "it")) == Counted(1, 1)


def test_an_unsolicited_message_is_not_a_round_trip(
    counted: tuple[CountingProxy, redis.Redis],
) -> None:
    proxy, client = counted
    with socket.create_connection(("127.0.0.1", int(proxy.url.split(":")[2][:-2]))) as listener:
        listener.sendall(b"*2\r\n$9\r\nSUBSCRIBE\r\n$4\r\nmail\r\n")
        assert b"subscribe" in listener.recv(1000)

        def tell() -> None:
            client.publish("mail", "first")
            assert b"first" in listener.recv(1000)
            client.publish("mail", "second")
            assert b"second" in listener.recv(1000)

        assert passed(proxy, tell) == Counted(2, 2)


# -- for real -------------------------------------------------------------------------------


# The test settings are not those of a benchmark.
ENVIRONMENT = {name: value for name, value in os.environ.items() if "DJANGO" not in name}


def benchmark(*options: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks", "--quick", "--no-postgres", *options]


def test_a_quick_run_measures_prints_judges_and_stores(tmp_path: Path) -> None:
    ran = subprocess.run(
        benchmark("--rounds", "2", "--rows", "cycle.idle.same", "check", "--output", str(tmp_path)),
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    (path,) = tmp_path.glob("*.json")
    data = json.loads(path.read_text())
    # 1 means that a budget was missed; on a busy machine that says nothing about the code.
    assert ran.returncode == (0 if all(each["holds"] for each in data["verdicts"]) else 1)
    assert "[1/3] cycle.idle.same: round 2 of 2" in ran.stderr
    assert "Traceback" not in ran.stderr
    cycle = data["rows"]["cycle.idle.same"]["subjects"]
    assert cycle["django-pglock"]["cannot"]
    for name in ("bare", "django-dlock", "redis-py Lock"):
        series = cycle[name]["series"]
        assert (series["round_trips"]["rounds"], series["commands"]["rounds"]) == ([2.0], [2.0])
        for metric in ("latency", "cpu"):
            assert len(series[metric]["rounds"]) == 2
    ratio = cycle["django-dlock"]["series"]["latency"]["ratio"]["spread"]["median"]
    assert f"{ratio:.2f}" in ran.stdout
    asked = data["rows"]["check"]["subjects"]["django-dlock"]["series"]
    assert set(asked) == {"check", "held", "remaining"}
    assert data["environment"]["packages"]["redis"] == redis.__version__
    stolen = data["environment"]["stolen"]
    assert 0 <= stolen < 1 if sys.platform == "linux" else stolen is None


def test_an_interrupted_run_leaves_no_server_behind(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    command = benchmark("--rows", "renewal.100", "--output", str(tmp_path))
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        assert any("round 1" in line for line in running.stderr)
        started = psutil.Process(running.pid).children(recursive=True)
        assert any("-server" in process.name() for process in started)
        running.terminate()
        assert running.wait(20) == 128 + signal.SIGTERM
    gone, alive = psutil.wait_procs(started, timeout=10)
    assert (len(gone), alive) == (len(started), [])
    assert list(tmp_path.iterdir()) == []


def test_every_budget_has_a_measurement() -> None:
    rows = {row.name: row for row in all_rows(Bench())}
    for budget in BUDGETS:
        row = rows[budget.row]
        metric = row.metric(budget.metric)
        subjects = {subject.name for subject in row.subjects}
        assert {budget.subject} <= subjects
        assert metric.floor is None or metric.floor in subjects
        if budget.statistic.startswith("p"):
            assert int(budget.statistic[1:]) in metric.percentiles


def test_every_row_has_a_bed_and_a_parser() -> None:
    rows = list(all_rows(Bench()))
    assert {row.bed for row in rows} == set(BEDS)
    assert {row.parser for row in rows} == set(PARSERS)


@pytest.mark.parametrize(
    ("rows", "beds", "chosen"),
    [
        (None, None, True),
        (["cycle"], None, True),
        (["cycle.distant-1.same"], None, True),
        (["cycle.distant-1.fresh", "check"], None, False),
        (["cyc"], None, False),
        (None, ["distant"], True),
        (["cycle"], ["distant-1"], True),
        (["cycle"], ["idle", "busy"], False),
    ],
)
def test_rows_are_chosen_by_name_and_bed(
    rows: list[str] | None, beds: list[str] | None, chosen: bool
) -> None:
    row = Row("cycle.distant-1.same.hiredis", "A row", (), (), bed="distant-1")
    assert _chosen(row, rows, beds) is chosen


def test_every_module_of_rows_runs_in_a_full_run() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks" / "rows").glob("[!_]*.py")}
    assert modules == set(MODULES)
