"""G1: what ``/proc`` and clocks show in another namespace proves nobody's death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from django_dlock import process
from testproject.servers import RedisServer
from tests.conftest import missing
from tests.faults.conftest import NewHolder
from tests.support.aliases import LONG
from tests.support.holder import ROOT, Holder

HOLD = f"lock = Lock('it', ttl={LONG}); lock.acquire()"
TRY = "Lock('it').acquire(timeout=0.5)"
"""Long enough for a waiter that takes the holder for dead."""

PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")
CONTAINER = (*PID_NAMESPACE, "--mount-proc")
TIME_NAMESPACE = ("unshare", "--time", "--boottime", "1000", "--fork", "--kill-child")

LAST_PID = "/proc/sys/kernel/ns_last_pid"

UNSHARE_TIME = """
import ctypes
assert ctypes.CDLL(None).unshare(0x80) == 0
with open("/proc/self/timens_offsets", "w") as offsets:
    offsets.write("7 1000 0")
"""
"""From then on, its children are in another time namespace, and the process itself is not."""

FOREIGN_THREAD = """
import _thread
from django_dlock import signals
def hold():
    global lock
    lock = Lock('it')
    lock.acquire()
    threading.Event().wait()
signals.renewed.connect(lambda **facts: say('renewed'), weak=False)
_thread.start_new_thread(hold, ())
"""
"""Python does not know when it ends, as with those of uWSGI."""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    for command in (CONTAINER, TIME_NAMESPACE):
        try:
            done = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
        except OSError as error:
            missing(f"{command[0]} is not installed: {error}")
        if done.returncode:
            missing(f"this machine forbids {' '.join(command)}: {done.stderr}")


def entering(holder: Holder) -> tuple[str, ...]:
    """The command that enters the PID namespace of a holder that ``unshare`` has started."""
    [child] = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    return ("nsenter", "--target", child, "--pid")


def with_pid(pid: int) -> tuple[str, ...]:
    """The command that starts a process with this pid, if no other has it."""
    if not os.path.exists(LAST_PID):
        missing(f"this kernel lets nobody choose a pid: it has no {LAST_PID}")
    # A shell closes the standard input of what it starts in the background.
    return ("sh", "-c", f'exec 3<&0; echo {pid - 1} > {LAST_PID}; "$0" "$@" <&3 & wait')


def clear(server: RedisServer, within: tuple[str, ...]) -> list[str]:
    """What ``clear_stale_locks`` clears."""
    command = [sys.executable, "manage.py", "clear_stale_locks", "--using", "default"]
    done = subprocess.run(
        [*within, *command, "--format", "json"],
        cwd=ROOT,
        env={**os.environ, "REDIS_URL": server.url},
        capture_output=True,
        text=True,
        check=False,
    )
    # The event of a lock that was cleared may be missing, where nobody has migrated the project.
    assert done.returncode in (0, 1), done.stderr
    return [lock["name"] for lock in json.loads(done.stdout) if "name" in lock]


def assert_nobody_gets_it(
    holder: Holder, new_holder: NewHolder, server: RedisServer, within: tuple[str, ...]
) -> None:
    """Neither a waiter nor an operator within these namespaces takes the holder for dead."""
    holder.do(HOLD)
    waiter = new_holder(within=within)
    assert clear(server, within) == []
    assert waiter.do(TRY) is False


def test_g1_another_namespaces_proc_proves_no_death(
    new_holder: NewHolder, own_redis: RedisServer
) -> None:
    """As ``nsenter -t PID -p``, which leaves the host's ``/proc`` in place."""
    holder = new_holder(within=CONTAINER)
    holder.do("os.getpid()")
    assert_nobody_gets_it(holder, new_holder, own_redis, entering(holder))


def test_g1_a_holder_does_not_introduce_itself_with_the_start_of_another_process(
    new_holder: NewHolder,
) -> None:
    """To the holder, its own pid in ``/proc`` is a process of the host."""
    holder = new_holder(within=PID_NAMESPACE)
    holder.do("os.getpid()")
    within = (*entering(holder), "unshare", "--mount-proc")
    holder.do(HOLD)
    assert new_holder(within=within).do(TRY) is False


def test_g1_a_zombie_of_an_outer_namespace_is_another_process(
    new_holder: NewHolder,
) -> None:
    with subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        holder = new_holder(within=(*PID_NAMESPACE, *with_pid(zombie.pid)))
        assert holder.do("os.getpid()") == zombie.pid
        holder.do(HOLD)
        assert new_holder(within=entering(holder)).do(TRY) is False


def test_g1_another_time_namespace_proves_no_death(
    holder: Holder, new_holder: NewHolder, own_redis: RedisServer
) -> None:
    assert_nobody_gets_it(holder, new_holder, own_redis, TIME_NAMESPACE)
    # That no such process exists is seen there, too.
    holder.kill()
    assert clear(own_redis, TIME_NAMESPACE) == ["it"]


def test_g1_a_container_with_the_machines_pids_is_not_known_by_the_machine_id_of_its_image(
    new_holder: NewHolder,
) -> None:
    """As a pod with ``hostPID``, whose successor on another node has the same host name and image.

    Its other boot id would prove that the first one is dead, which is only cut off.
    """
    if not process.current().machine_id:
        pytest.skip("no machine id counts within a container, where this test runs itself")
    holder = new_holder(within=("unshare", "--uts"))
    holder.do("from django_dlock import process")
    assert holder.do("process.current().machine_id") == ""


@pytest.mark.nightly
def test_g1_a_child_in_another_time_namespace_does_not_take_its_parent_for_dead(
    holder: Holder,
) -> None:
    holder.do(UNSHARE_TIME)
    holder.do(HOLD)
    assert holder.do(f'in_fork("{TRY}")') is False


@pytest.mark.nightly
def test_g1_a_process_that_has_moved_to_another_time_namespace_proves_no_death(
    holder: Holder, new_holder: NewHolder
) -> None:
    holder.do(HOLD)
    observer = new_holder()
    # It reads its identity, and starts no thread: only a process with a single one may move.
    states = "[info.holder_state for info in locks['default'].list()]"
    assert observer.do(states) == ["alive"]
    observer.do(UNSHARE_TIME)
    observer.do("there = os.open('/proc/self/ns/time_for_children', os.O_RDONLY)")
    assert observer.do("ctypes.CDLL(None).setns(there, 0)") == 0
    assert observer.do(states) == ["alive"]


@pytest.mark.nightly
def test_g1_a_child_in_another_pid_namespace_with_its_parents_pid_proves_no_death(
    new_holder: NewHolder,
) -> None:
    """The first process of a namespace makes another one, whose first process has its pid."""
    observer = new_holder(within=CONTAINER)
    assert observer.do("os.getpid()") == 1
    # No thread of the child has this id.
    holder = new_holder(within=(*entering(observer), *with_pid(1000)))
    holder.do(HOLD)
    # It reads its identity.
    observer.do("locks['default'].list()")
    observer.do("import ctypes; ctypes.CDLL(None).unshare(0x20000000)")
    assert observer.do(f'in_fork("os.getpid(), {TRY}")') == [1, False]


def test_g1_a_thread_that_python_did_not_start_keeps_its_lock_beside_another_namespaces_proc(
    new_holder: NewHolder,
) -> None:
    """To such a ``/proc``, the threads of the process have other ids."""
    holder = new_holder(within=PID_NAMESPACE)
    holder.do(FOREIGN_THREAD)
    holder.wait_until_said("renewed")
    assert holder.do("lock.held")
