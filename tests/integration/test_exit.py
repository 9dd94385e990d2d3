"""A process of any kind that ends normally releases its locks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, multiprocess

from django_dlock import clock, locks
from django_dlock.lease import Renewal
from testproject.servers import RedisServer

pytestmark = pytest.mark.extended

HEAD = """
import os, sys
import django
django.setup()
from django_dlock import Lock

def say(*words):
    # At once, because two threads speak.
    os.write(1, f"{' '.join(words)}\\n".encode())

def hold():
    # The module keeps it alive, as in a careless program.
    global lock
    lock = Lock("exit:1", on_lost=lambda lock, reason: say("on_lost", reason))
    # A new process may take long to connect.
    assert lock.acquire(timeout=20), "taken"
    print(lock.owner, flush=True)

"""

LISTENING = """
import logging
from django.test import override_settings
from django_dlock import signals
logging.basicConfig(stream=sys.stderr, format="%(message)s")
counted = {"EXPORTERS": ["prometheus"], "RECORDS": False, "GROUPS": ["exit"]}
override_settings(DLOCK_METRICS=counted).enable()

def receive(name, reason, **facts):
    if name == "exit:1":
        say("received", reason)

signals.lost.connect(receive)
"""

ENDS = {
    "a main process": "hold()",
    "an exception": "hold(); raise SystemExit(3)",
    "a main process of Python 3.12, in which no thread starts any more": """
import atexit, threading
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
from django_dlock.core import event_queue
event_queue.IDLE = 0.001
hold()
# Only the thread that renews is left.
while [each for each in threading.enumerate() if each.name == "dlock-metrics"]:
    threading.Event().wait(0.01)
atexit.register(setattr, threading.Thread, "start", refuse)
""",
    "a thread's lock": """
import threading
thread = threading.Thread(target=hold); thread.start(); thread.join()
""",
    "a daemon thread's lock": """
import threading
held = threading.Event()
def work():
    hold(); held.set(); threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
held.wait()
""",
    "a worker of gunicorn, which is forked and calls sys.exit": """
pid = os.fork()
if not pid:
    hold(); sys.exit(0)
os.waitpid(pid, 0)
os._exit(0)
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
def test_g2_a_process_that_ends_normally_releases_and_reports_its_leases(
    how: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    backend, metrics = locks["default"], {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", HEAD + LISTENING + ENDS[how]],
        env={**os.environ, "PYTHONPATH": os.getcwd(), **metrics},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode in (0, 3), process.stderr
    owner, *told = process.stdout.splitlines()
    renewal = Renewal("exit:1", owner, 30.0)
    (answer,) = backend.renew([renewal], process="p", deadline=clock.now() + 20)
    assert answer.outcome == "released", process.stderr
    assert sorted(told) == ["on_lost exit", "received exit"]
    assert process.stderr.count("Lock 'exit:1' (alias 'default') was lost after") == 1
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    labels = {"alias": "default", "group": "exit"}
    # Nothing: the process has removed its file of what is true only while it runs.
    assert not registry.get_sample_value("django_dlock_held", labels)
    assert registry.get_sample_value("django_dlock_losses_total", {**labels, "reason": "exit"}) == 1


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
