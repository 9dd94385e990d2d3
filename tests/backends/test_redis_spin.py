"""Replies are looked for before a thread sleeps, where that pays, and nowhere else."""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from django_dlock.backends import redis_spin
from django_dlock.backends.redis_spin import LET_GO_FOR, MOST_LEFT_OUT, Spin

from .tools import backend_for, grant, release, request

PATIENCE = 10.0

NEVER_SOON = 1e-9
"""Seconds in which nothing comes."""
LONG = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[SimpleNamespace, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        yield SimpleNamespace(_sock=ours), its


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One for each time that somebody began to look."""
    begun: list[float] = []
    poll = Spin._poll

    def counted(spin, sock):
        begun.append(1)
        return poll(spin, sock)

    monkeypatch.setattr(Spin, "_poll", counted)
    return begun


def test_a_look_ends_when_the_reply_comes(ends, monkeypatch):
    connection, its = ends
    looks = []

    def others_go_before() -> None:
        looks.append(1)
        if len(looks) == 3:
            its.sendall(b"+OK\r\n")

    monkeypatch.setattr(redis_spin, "_let_others", others_go_before)
    Spin(LONG).look(connection)
    assert len(looks) == 3
    assert connection._sock.recv(100) == b"+OK\r\n"


def test_slow_replies_are_looked_for_ever_more_seldom(ends, polls):
    connection, _ = ends
    spin = Spin(NEVER_SOON)
    tries = []
    for _ in range(400):
        before = len(polls)
        spin.look(connection)
        tries.append(len(polls) - before)
    looked = [number for number, tried in enumerate(tries) if tried]
    gaps = [later - earlier - 1 for earlier, later in itertools.pairwise(looked)]
    assert gaps[:6] == [1, 3, 7, 15, 31, 63]
    assert set(gaps[6:]) == {MOST_LEFT_OUT}


def test_one_fast_reply_brings_the_looks_back(ends, polls, monkeypatch):
    connection, its = ends
    spin = Spin(NEVER_SOON)
    for _ in range(10):
        spin.look(connection)
    its.sendall(b"+OK\r\n")
    while len(polls) < 4:
        spin.look(connection)
    before = len(polls)
    spin.look(connection)
    assert len(polls) == before + 1


def test_zero_looks_never(ends, polls):
    Spin(0.0).look(ends[0])
    assert not polls


@pytest.mark.parametrize("sock", [None, "closed"])
def test_a_connection_that_is_closed_is_left_to_its_reader(sock):
    closed = socket.socket()
    closed.close()
    Spin(LONG).look(SimpleNamespace(_sock=closed if sock else None))


def test_where_greenlets_are_in_the_place_of_threads_nobody_looks(ends, monkeypatch):
    class Theirs:
        """As gevent's."""

    monkeypatch.setattr(select, "poll", Theirs)
    Spin(LONG).look(ends[0])
    monkeypatch.delattr(select, "poll")
    Spin(LONG).look(ends[0])


def test_a_renewal_whose_answer_is_there_is_not_looked_for(own_redis, polls):
    backend = backend_for(own_redis.url)
    grant(backend, request())
    backend.renew([], process="p", deadline=backend.call_deadline())
    before = len(polls)
    pending = backend.start_renew([], process="p", deadline=backend.call_deadline())
    assert pending.wait(PATIENCE)
    assert pending.result() == []
    assert len(polls) == before


def test_every_reply_of_a_backend_is_looked_for(own_redis, polls):
    backend = backend_for(own_redis.url, options={"spin": 0.01})
    # The server does not know the scripts yet.
    release(backend, grant(backend, request()))
    before = len(polls)
    assert release(backend, grant(backend, request())) == "released"
    assert len(polls) == before + 2
    silent = backend_for(own_redis.url, options={"spin": 0})
    assert release(silent, grant(silent, request())) == "released"
    assert len(polls) == before + 2


def test_a_socket_is_looked_at_though_another_had_its_number_before():
    spin = Spin(LONG)
    for _ in range(3):
        ours, its = socket.socketpair()
        with ours, its:
            number = ours.fileno()
            its.sendall(b":1\r\n")
            spin.look(SimpleNamespace(_sock=ours))
    assert set(spin._polls.by_number) == {number}


def test_no_two_threads_look_with_the_same(ends):
    spin = Spin(LONG)
    theirs: list[object] = []
    other = threading.Thread(target=lambda: theirs.append(spin._poll(ends[0]._sock)))
    other.start()
    other.join(PATIENCE)
    mine = spin._poll(ends[0]._sock)
    assert spin._poll(ends[0]._sock) is mine
    assert theirs[0].__self__ is not mine.__self__


@pytest.mark.parametrize("error", [AttributeError, OSError, RuntimeError, TimeoutError, ValueError])
def test_what_a_signal_handler_raises_during_a_look_reaches_the_caller(ends, error, monkeypatch):
    looks = []

    def strikes_at_the_fifth() -> None:
        looks.append(1)
        if len(looks) == 5:
            raise error

    monkeypatch.setattr(redis_spin, "_let_others", strikes_at_the_fifth)
    with pytest.raises(error):
        Spin(LONG).look(ends[0])


def test_where_processors_are_busy_looks_become_seldom_too(ends, polls, monkeypatch):
    connection, its = ends
    its.sendall(b":1\r\n")
    now = [0.0]
    monkeypatch.setattr(redis_spin.time, "perf_counter", lambda: now[0])

    def others_take_long() -> None:
        now[0] += LET_GO_FOR

    monkeypatch.setattr(redis_spin, "_let_others", others_take_long)
    spin = Spin(NEVER_SOON)
    for _ in range(400):
        spin.look(connection)
    seldom = len(polls)
    # The first, those that follow 1, 3, 7, 15, 31 that are left out, and each that follows 63.
    assert seldom == 1 + 5 + 5
    monkeypatch.setattr(redis_spin, "_let_others", lambda: None)
    while len(polls) == seldom:
        spin.look(connection)
    # One in which they did not brings the looks back.
    spin.look(connection)
    assert len(polls) == seldom + 2
