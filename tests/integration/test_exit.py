"""A process of any kind that ends normally releases its locks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from django_dlock import clock, locks
from django_dlock.lease import Renewal
from testproject.servers import RedisServer

pytestmark = pytest.mark.extended

HEAD = """
import os, sys
import django
django.setup()
from django_dlock import Lock

def hold():
    # The module keeps it alive, as in a careless program.
    global lock
    lock = Lock("exit")
    # A new process may take long to connect.
    assert lock.acquire(timeout=20), "taken"
    print(lock.owner, flush=True)

"""

ENDS = {
    "a main process": "hold()",
    "an exception": "hold(); raise SystemExit(3)",
    "a thread's lock": """
import threading
thread = threading.Thread(target=hold); thread.start(); thread.join()
""",
    "a forked child of multiprocessing": """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=hold); child.start(); child.join()
assert child.exitcode == 0
Lock("other").acquire()
os._exit(0)
""",
    "a pool child": """
import multiprocessing
pool = multiprocessing.get_context("fork").Pool(1)
pool.apply(hold); pool.close(); pool.join()
os._exit(0)
""",
    "a child of billiard": """
import billiard
child = billiard.get_context("fork").Process(target=hold); child.start(); child.join()
assert child.exitcode == 0
os._exit(0)
""",
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_ends_normally_releases_its_leases(
    how: str, redis_server: RedisServer
) -> None:
    backend = locks["default"]
    process = subprocess.run(
        [sys.executable, "-c", HEAD + ENDS[how]],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode in (0, 3), process.stderr
    renewal = Renewal("exit", process.stdout.split()[-1], 30.0)
    (told,) = backend.renew([renewal], process="p", deadline=clock.now() + 20)
    assert told.outcome == "released", process.stderr


def test_g2_a_loss_just_before_the_end_of_the_process_is_reported(
    redis_server: RedisServer,
) -> None:
    body = """
import time
from django_dlock import locks, signals

def receive(reason, **facts):
    time.sleep(0.3)
    print("told", reason, flush=True)

signals.lost.connect(receive)
lock = Lock("exit:lost")
lock.acquire()
locks["default"].break_("exit:lost", owner=lock.owner)
try:
    lock.release()
except Exception as error:
    print(type(error).__name__, flush=True)
"""
    process = subprocess.run(
        [sys.executable, "-c", HEAD + body],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.stdout.split("\n")[:2] == ["LeaseLost", "told broken"], process.stderr


def test_g8_an_exit_of_a_forked_child_does_not_release_the_parents(
    redis_server: RedisServer,
) -> None:
    script = """
hold()
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
assert lock.locked(), "freed by the child"
lock.release()
"""
    process = subprocess.run(
        [sys.executable, "-c", HEAD + script],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
