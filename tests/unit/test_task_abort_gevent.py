"""Interrupting a body that runs in a greenlet, and never any other code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from django_dlock.celery.delivery import greenlets

pytest.importorskip("gevent", reason="gevent is not installed: there is no wheel")

PATCHED = """
from gevent import monkey; monkey.patch_all()
import threading, time, django; django.setup()
from django_dlock.celery.delivery.interrupt import BodyRunner, LeaseAborted
"""


def under_gevent(source: str) -> str:
    """The output of the script in a process whose threads are greenlets."""
    done = subprocess.run(
        [sys.executable, "-c", PATCHED + source],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


def test_a_thread_is_no_greenlet_if_gevent_is_only_imported():
    import gevent.monkey

    assert not gevent.monkey.is_module_patched("threading")
    assert greenlets.current() is None


@pytest.mark.parametrize("who", ["greenlet", "main"])
def test_a_body_is_interrupted_each_time_it_waits(who):
    script = f"""
guard, swallowed = BodyRunner(), []
def body():
    guard.interrupt(None, "broken")
    while len(swallowed) < 3:
        try:
            threading.Event().wait()
        except Exception as error:
            swallowed.append(type(error).__name__)
def run():
    try:
        guard.run(body)
    except LeaseAborted as error:
        print(error.reason, guard.interruptions, *swallowed)
if {who!r} == "main":
    run()
else:
    greenlet = threading.Thread(target=run); greenlet.start(); greenlet.join()
"""
    assert under_gevent(script) == "broken 3 LeaseAborted LeaseAborted LeaseAborted"


def test_nothing_is_interrupted_once_the_body_has_ended():
    """The loss comes some turns of the hub before or after the end of the body."""
    script = """
stopped = ended = 0
for turns in range(12):
    for head_start in range(12):
        guard = BodyRunner()
        def lose():
            for _ in range(head_start):
                time.sleep(0)
            guard.interrupt(None, "broken")
        def body():
            for _ in range(turns):
                time.sleep(0)
            # The interrupting greenlet has had its turn, but the hub has not.
            if guard.reason is not None and not guard.interruptions:
                guard._interrupt_once()
        loser = threading.Thread(target=lose)
        loser.start()
        try:
            guard.run(body)
            ended += 1
        except LeaseAborted:
            stopped += 1
        # Bookkeeping code that waits: any exception here ends the script.
        loser.join()
        for _ in range(20):
            time.sleep(0)
        assert guard._ended.is_set()
print(stopped > 10, ended > 10)
"""
    assert under_gevent(script) == "True True"


def test_a_body_that_never_waits_is_not_stopped_and_its_outcome_counts():
    script = """
guard = BodyRunner()
def body():
    guard.interrupt(None, "broken")
    return sum(range(1000))
print(guard.run(body), guard.interruptions)
"""
    assert under_gevent(script) == "499500 0"
