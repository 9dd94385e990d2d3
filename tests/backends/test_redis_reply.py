"""The usual replies are taken off the socket; whatever else comes is left where it lies."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from redis import exceptions as errors
from redis.connection import AbstractConnection

from django_dlock.backends import redis_connections
from django_dlock.backends.redis_reply import LONGEST, PONG, take

from .test_redis_connections import certificates, tls_redis
from .tools import backend_for, grant, release, request

__all__ = ["certificates", "tls_redis"]

NOBODY_ANSWERS = 0.05
"""Seconds."""


class Usual:
    """A connection as far as it is looked at here."""

    read_response = AbstractConnection.read_response

    def __init__(self, sock: socket.socket | None) -> None:
        self._sock = sock


class OfAProject(Usual):
    def read_response(self, *args, **kwargs):
        return super().read_response(*args, **kwargs)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        ours.settimeout(10)
        yield ours, its


def left_in(sock: socket.socket) -> bytes:
    sock.setblocking(False)
    try:
        return sock.recv(10 * LONGEST)
    except BlockingIOError:
        return b""


def taken_and_left(
    ends: tuple[socket.socket, socket.socket], after: bytes, said: bytes
) -> tuple[int | bytes | None, bytes]:
    """What is taken of that, and what is left."""
    ours, its = ends
    its.sendall(said)
    return take(Usual(ours), after), left_in(ours)


@pytest.mark.parametrize(
    ("after", "said", "reply"),
    [
        (b"", b":1\r\n", 1),
        (b"", b":1795364077611594\r\n", 1795364077611594),
        (b"", b":0\r\n", 0),
        (b"", b"$7\r\nexpired\r\n", b"expired"),
        (b"", b"$0\r\n\r\n", b""),
        (b"", b"$11\r\nheld\r\n1\r\n:2\r\n", b"held\r\n1\r\n:2"),
        (PONG, PONG + b":1\r\n", 1),
        (PONG, PONG + b"$7\r\nrefused\r\n", b"refused"),
    ],
)
def test_a_number_or_a_text_is_taken_and_nothing_of_it_left(ends, after, said, reply):
    assert taken_and_left(ends, after, said) == (reply, b"")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        # Not complete yet.
        (b"", b":"),
        (b"", b":12"),
        (b"", b":12\r"),
        (b"", b"$"),
        (b"", b"$7\r\n"),
        (b"", b"$7\r\nexpired"),
        (b"", b"$7\r\nexpired\r"),
        (b"", b"$12\r\nexpired\r\n"),
        (b"", b"$%d\r\n" % LONGEST + b"x" * LONGEST + b"\r\n"),
        (PONG, PONG),
        (PONG, PONG[:3]),
        (PONG, PONG + b":1"),
        (PONG, PONG + b"$7\r\nexpi"),
        # Another kind, or one that is none.
        (b"", b":-1\r\n"),
        (b"", b":\r\n"),
        (b"", b":1.5\r\n"),
        (b"", b"$-1\r\n"),
        (b"", b"+OK\r\n"),
        (b"", b"*1\r\n:1\r\n"),
        (b"", b"-NOSCRIPT No matching script.\r\n"),
        (b"", PONG + b":1\r\n"),
        (PONG, b":1\r\n"),
        (PONG, PONG + b"-READONLY You can't write against a read only replica.\r\n"),
        (PONG, b"-NOPERM this user has no permissions to run the 'ping' command\r\n:1\r\n"),
        # More than was asked for.
        (b"", b":1\r\n:2\r\n"),
        (b"", b"$7\r\nexpired\r\n:1\r\n"),
        (b"", b"$3\r\nexpired\r\n"),
    ],
)
def test_whatever_else_comes_stays_where_it_lies(ends, after, said):
    assert taken_and_left(ends, after, said) == (None, said)


def test_one_that_is_closed_over_there_is_left_to_its_reader(ends):
    ours, its = ends
    its.close()
    assert take(Usual(ours)) is None


def test_one_that_is_closed_here_too(ends):
    assert take(Usual(None)) is None


def test_one_of_a_projects_own_class_reads_all_of_its_replies(ends):
    ours, its = ends
    its.sendall(b":1\r\n")
    assert take(OfAProject(ours)) is None
    assert left_in(ours) == b":1\r\n"


def test_where_no_reply_comes_the_sockets_timeout_ends_it(ends):
    ours, _ = ends
    ours.settimeout(NOBODY_ANSWERS)
    with pytest.raises(errors.TimeoutError):
        take(Usual(ours))


def test_a_cut_is_one_for_those_who_try_again():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        its, _ = server.accept()
        with ours:
            # So that it is reset, and not ended in order.
            its.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            its.close()
            with pytest.raises(errors.ConnectionError):
                take(Usual(ours))


# -- at a server ----------------------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int | bytes | None]:
    replies: list[int | bytes | None] = []

    def noted(connection, after=b""):
        replies.append(take(connection, after))
        return replies[-1]

    monkeypatch.setattr(redis_connections, "take", noted)
    return replies


def test_what_a_lock_is_told_is_taken(own_redis, taken):
    backend = backend_for(own_redis.url)
    # The server does not know the scripts yet, and connects.
    release(backend, grant(backend, request()))
    del taken[:]
    lease = grant(backend, request())
    met = backend.acquire(request(), deadline=backend.call_deadline())
    assert release(backend, lease) == "released"
    assert release(backend, lease) == "released"
    assert taken[0] == lease.token
    assert isinstance(taken[1], bytes)
    assert met.owner == lease.owner
    assert taken[2:] == [1, b"released"]


def test_with_less_time_than_a_sockets_nobody_waits_on_it(own_redis, taken):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    del taken[:]
    hurried = backend.call_deadline() - backend.command_timeout / 2
    assert backend.release(lease.name, lease.owner, min_hold=0, deadline=hurried) == "released"
    assert not taken


def test_with_tls_all_are_left_to_redis_py(tls_redis, certificates, taken):
    options = {"connection_kwargs": {"ssl_ca_certs": str(certificates[2])}}
    backend = backend_for(tls_redis.url, options=options)
    release(backend, grant(backend, request()))
    assert set(taken) == {None}
