"""A process counts as dead only if that is proven."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from django_dlock import process
from django_dlock.process import ProcessIdentity, current, death_proof

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux' /proc")


def other(**facts: object) -> ProcessIdentity:
    return current()._replace(**{"id": "other", **facts})  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ProcessIdentity:
    """This process, on a machine that reports all of its properties."""
    me = current()._replace(machine_id="m1", boot_id="b1")
    monkeypatch.setattr(process.identity, "_current", me)
    return me


def a_dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_an_identity_survives_its_json_form() -> None:
    assert ProcessIdentity.from_dict(current().as_dict()) == current()


def test_a_living_process_is_not_dead(machine: ProcessIdentity) -> None:
    assert death_proof(machine) is None


def test_a_pid_that_does_not_exist_is_dead(machine: ProcessIdentity) -> None:
    assert death_proof(other(pid=a_dead_pid())) == "gone"


@linux
def test_a_process_whose_pid_was_reused_is_dead(machine: ProcessIdentity) -> None:
    assert death_proof(other(started="1")) == "gone"


@linux
def test_a_zombie_is_dead_before_it_is_reaped(machine: ProcessIdentity) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert death_proof(other(pid=child.pid, started="")) == "gone"
    finally:
        child.wait()
        child.stdout.close()


def test_an_identity_of_an_earlier_version_proves_nothing_by_its_start(
    machine: ProcessIdentity,
) -> None:
    facts = {**machine.as_dict(), "id": "other", "start_time": "1"}
    # Earlier versions compare that with what they read in any namespace.
    assert "start_time" not in machine.as_dict()
    del facts["time_namespace"], facts["started"]
    earlier = ProcessIdentity.from_dict(facts)
    assert death_proof(earlier) is None
    assert death_proof(earlier._replace(pid=a_dead_pid())) == "gone"


@linux
def test_a_start_of_another_time_namespace_proves_nothing(
    machine: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert death_proof(other(started="1", time_namespace="another")) is None
    unknown = other(started="1", time_namespace="")
    assert death_proof(unknown) is None
    monkeypatch.setattr(process.identity, "_namespace", lambda kind: "")
    monkeypatch.setattr(process.identity, "pid_namespace", lambda: unknown.pid_namespace)
    assert death_proof(unknown) is None


@linux
def test_without_time_namespaces_a_reused_pid_is_still_a_proof(
    machine: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "lexists", lambda path: path != "/proc/self/ns/time")
    process.reset()
    me = current()
    assert me.started
    assert death_proof(me) is None
    assert death_proof(me._replace(started="1")) == "gone"


@linux
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_process_that_has_changed_its_user_proves_what_others_prove() -> None:
    """As a worker with ``--uid``, to which ``/proc`` shows less of itself."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setuid(65534)
        me = current()
        os.write(writer, f"{death_proof(me)} {death_proof(me._replace(started='1'))}".encode())
        os._exit(0)
    os.wait()
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() == "None gone"


@linux
@pytest.mark.parametrize("status", ["NSpid:\t{pid}\t{pid}", "NSpid:\t7\t{pid}", "Pid:\t{pid}", ""])
def test_the_proc_of_another_pid_namespace_proves_nothing(
    status: str, machine: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if this process has the same pid in both by chance."""
    read = process.identity._read

    def read_there(path: str) -> str:
        return status.format(pid=os.getpid()) if path == "/proc/self/status" else read(path)

    assert death_proof(other(started="1")) == "gone"
    monkeypatch.setattr(process.identity, "_read", read_there)
    assert death_proof(other(started="1")) is None
    assert process.identity_of(os.getpid()).started == ""
    # That needs no /proc.
    assert death_proof(other(pid=a_dead_pid())) == "gone"


@linux
def test_a_process_that_proc_hides_is_not_dead(
    machine: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the mount option ``hidepid``."""
    read = process.identity._read
    monkeypatch.setattr(
        process.identity, "_read", lambda path: "" if path.endswith("/stat") else read(path)
    )
    assert death_proof(other(started="1")) is None


@pytest.mark.parametrize(
    "facts",
    [
        {"pid_namespace": "ns2"},
        {"boot_id": ""},
        {"boot_id": "b2", "machine_id": "m2"},
        # Cloned machines share everything else.
        {"host": "clone"},
        {"host": "clone", "boot_id": "b2"},
    ],
)
def test_nothing_is_proven_across_machines_and_containers(
    machine: ProcessIdentity, facts: dict[str, str]
) -> None:
    # The same pid in another container is another process, even if it has died here.
    assert death_proof(other(pid=a_dead_pid(), **facts), silent=True) is None


def test_another_boot_of_the_same_machine_proves_death_without_heartbeats(
    machine: ProcessIdentity,
) -> None:
    before = other(boot_id="b0")
    assert death_proof(before, silent=True) == "rebooted"
    # Cloned machines share a machine id; a heartbeat refutes the proof.
    assert death_proof(before) is None


def test_without_a_machine_id_another_boot_proves_nothing(
    machine: ProcessIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process.identity, "_current", machine._replace(machine_id=""))
    assert death_proof(other(machine_id="", boot_id="b0"), silent=True) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_child_has_its_own_identity() -> None:
    mine = current().id
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, current().id.encode())
        os._exit(0)
    os.wait()
    os.close(writer)
    with os.fdopen(reader) as answer:
        assert answer.read() not in ("", mine)
