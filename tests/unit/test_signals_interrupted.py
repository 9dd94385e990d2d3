"""What happens in the middle of a call of a signal leaves the signal usable."""

from __future__ import annotations

import os
import threading

import pytest
from django.dispatch import Signal

from django_dlock import Lock, signals
from django_dlock.core import dispatch


def receive(**_: object) -> None:
    pass


@pytest.fixture
def signal() -> Signal:
    """One like ours, because a failure leaves it locked."""
    signal = type(signals.released)()
    signal.connect(receive)
    return signal


def test_a_finalizer_may_send_a_signal_while_its_thread_does(signal: Signal) -> None:
    """Or a signal handler. Garbage may be collected anywhere, also in Django's own lock."""

    def is_interrupted() -> None:
        with signal.lock:
            dispatch.send(signal, Lock)

    thread = threading.Thread(target=is_interrupted, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_sends_a_signal_although_a_thread_of_its_parent_did_at_the_fork(
    signal: Signal,
) -> None:
    inside, forked = threading.Event(), threading.Event()

    def send() -> None:
        with signal.lock:
            inside.set()
            forked.wait(30)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    assert inside.wait(30)
    pid = os.fork()
    if pid == 0:
        using = threading.Thread(target=dispatch.send, args=(signal, Lock), daemon=True)
        using.start()
        using.join(5)
        os._exit(using.is_alive())
    forked.set()
    sending.join(30)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
