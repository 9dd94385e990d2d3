"""A receiver or an ``on_lost`` that hangs delays no other report, and the log names it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAD = """
import asyncio, logging, os, socket, sys, threading
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_dlock"],
    DLOCKS={"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}},
    DLOCK_METRICS={"EXPORTERS": ["prometheus"], "RECORDS": False, "GROUPS": ["shop"]},
)
import django
django.setup()
import prometheus_client
from django_dlock import Lock, LeaseLost, locks, signals

logging.basicConfig(stream=sys.stdout, format="%(message)s")
silent = socket.create_server(("127.0.0.1", 0))

def ask_the_network(*_, **__):
    # Without a time limit.
    socket.create_connection(silent.getsockname()).recv(1)

def lose(name, on_lost=None):
    lock = Lock(name, on_lost=on_lost)
    assert lock.acquire() and locks["default"].break_(name, owner=lock.owner)
    try:
        lock.renew()
    except LeaseLost:
        pass

def counted():
    return prometheus_client.REGISTRY.get_sample_value(
        "django_dlock_losses_total", {"alias": "default", "group": "shop", "reason": "broken"}
    )

def until(condition):
    for _ in range(200):
        if condition():
            return
        threading.Event().wait(0.1)
    os._exit(3)

"""


def run(body: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + body],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_g2_losses_are_reported_while_a_receiver_hangs() -> None:
    told = run("""
from django_dlock.core import event_queue
# Nothing is given up.
event_queue.HANGING_AFTER = 1000.0
signals.lost.connect(ask_the_network)
called = []
for number in range(12):
    lose(f"shop:{number}", lambda lock, reason: called.append(lock.name))
until(lambda: len(called) == 12 and counted() == 12)
os._exit(0)
""")
    assert told.count("was lost after") == 12


def test_g2_the_other_receivers_go_on_while_many_hang() -> None:
    told = run("""
from django_dlock.core import event_queue
event_queue.HANGING_AFTER = 0.05
async def wait(**_):
    await asyncio.Event().wait()

hanging = [lambda **_: ask_the_network() for _ in range(2)]
for each in (*hanging, wait):
    signals.lost.connect(each)
received = []
def receive(name, **_):
    received.append(name)
signals.lost.connect(receive)
for number in range(12):
    lose(f"shop:{number}")
until(lambda: len(received) == 12)
os._exit(0)
""")
    assert told.count("<lambda> has taken") == 2
    assert told.count("__main__.wait has taken") == 1


def test_g2_an_on_lost_waits_for_no_other_one_that_hangs() -> None:
    run("""
called = threading.Event()
for number in range(20):
    lose(f"shop:{number}", ask_the_network)
lose("shop:last", lambda *_: called.set())
until(called.is_set)
os._exit(0)
""")


def test_g2_a_handler_of_the_log_that_hangs_delays_no_other_report() -> None:
    run("""
class Sends(logging.Handler):
    def emit(self, record):
        ask_the_network()

logging.getLogger("django_dlock").addHandler(Sends())
called, received = [], []
def receive(name, **_):
    received.append(name)
signals.lost.connect(receive)
for number in range(12):
    lose(f"shop:{number}", lambda lock, reason: called.append(lock.name))
until(lambda: len(called) == len(received) == 12 and counted() == 12)
os._exit(0)
""")


@pytest.mark.nightly
def test_a_receiver_that_takes_ten_seconds_is_named() -> None:
    told = run("""
signals.lost.connect(ask_the_network)
lose("shop:1")
threading.Event().wait(11)
os._exit(0)
""")
    assert "__main__.ask_the_network has taken 10 s" in told


def test_what_hangs_when_the_process_ends_is_told() -> None:
    told = run("""
signals.lost.connect(ask_the_network)
lose("shop:1")
lose("shop:2")
""")
    assert "__main__.ask_the_network (2 times) was not called, or did not return" in told
