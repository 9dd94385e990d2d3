"""Every reply is read completely and exactly once, in any number of pieces, or not at all."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from redis import ConnectionPool
from redis import exceptions as errors

from django_dlock import clock
from django_dlock.backends.redis.connection import Connection, ConnectionBroken, ErrorReply
from django_dlock.backends.redis.polling import Spin
from django_dlock.backends.redis.route import Route
from django_dlock.exceptions import BackendUnavailable
from tests.support.redis_calls import (
    backend_for,
    client,
    grant,
    pool_of,
    release,
    renew,
    request,
    socket_of,
)

from .test_redis_connections import certificates, tls_redis

__all__ = ["certificates", "tls_redis"]

PATIENCE = 10.0
ROUTE = Route(ConnectionPool(), {}, ())


def connection_on(sock: socket.socket) -> Connection:
    sock.settimeout(PATIENCE)
    return Connection(SimpleNamespace(_sock=sock, disconnect=sock.close), Spin(), ROUTE)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        yield connection_on(ours), its


def read(connection: Connection) -> Any:
    return connection.read(clock.now() + PATIENCE)


STREAM: list[tuple[bytes, Any]] = [
    (b":1\r\n", 1),
    (b":-1795364077611594\r\n", -1795364077611594),
    (b"+PONG\r\n", b"PONG"),
    (b"$7\r\nexpired\r\n", b"expired"),
    (b"$0\r\n\r\n", b""),
    (b"$-1\r\n", None),
    (b"$11\r\nheld\r\n1\r\n:2\r\n", b"held\r\n1\r\n:2"),
    (b"*0\r\n", []),
    (b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$2\r\n\r\n\r\n", [b"message", b"c", b"\r\n"]),
    (b"*2\r\n*1\r\n:1\r\n*2\r\n$-1\r\n:2\r\n", [[1], [None, 2]]),
]
SENT = b"".join(sent for sent, _ in STREAM)
REPLIES = [reply for _, reply in STREAM]


@pytest.mark.parametrize("cut", range(1, len(SENT)))
def test_g5_a_reply_split_anywhere_is_read_completely(ends, cut):
    connection, its = ends
    its.sendall(SENT[:cut])
    replies = []
    with pytest.raises(errors.TimeoutError):
        while True:
            replies.append(connection.read(clock.now()))
    its.sendall(SENT[cut:])
    while len(replies) < len(REPLIES):
        replies.append(read(connection))
    assert replies == REPLIES
    assert connection.is_reusable


def test_an_error_is_raised_and_the_connection_stays_usable(ends):
    connection, its = ends
    its.sendall(b"-NOSCRIPT No matching script.\r\n:1\r\n")
    with pytest.raises(ErrorReply, match="No matching script") as raised:
        read(connection)
    assert raised.value.code == "NOSCRIPT"
    assert read(connection) == 1


SCRIPT = "ERR Error running script (call to f_db8d8f): @user_script:1: @user_script: 1: "
"""The prefix that Redis 6 adds to an error that ended a script."""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("OOM command not allowed. script: db8d8f, on @user_script:1.", "OOM"),
        (f"{SCRIPT}-OOM command not allowed when used memory > 'maxmemory'.", "OOM"),
        (f"{SCRIPT}The user executing the script can't run this command", "ERR"),
        ("something else", ""),
    ],
    ids=["redis 7", "redis 6", "redis 6, without a code", "none"],
)
def test_an_error_has_its_code(ends, text, code):
    connection, its = ends
    its.sendall(b"-%b\r\n" % text.encode())
    with pytest.raises(ErrorReply) as raised:
        read(connection)
    assert raised.value.code == code


@pytest.mark.parametrize(
    "text",
    [
        "READONLY You can't write against a read only replica. script: db8d8f.",
        f"{SCRIPT}-READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    ],
)
def test_the_reply_of_a_replica_counts_as_a_broken_connection(ends, text):
    connection, its = ends
    its.sendall(b"-%b\r\n" % text.encode())
    with pytest.raises(ConnectionBroken, match=r"READONLY|MASTERDOWN"):
        read(connection)


@pytest.mark.parametrize(
    "sent", [b"HTTP/1.1 400 Bad Request\r\n", b":\r\n", b":1.5\r\n", b"$one\r\n", b"\r\n"]
)
def test_malformed_replies_count_as_a_broken_connection(ends, sent):
    connection, its = ends
    its.sendall(sent)
    with pytest.raises(ConnectionBroken, match="not a reply"):
        read(connection)


def test_a_connection_closed_by_the_server_counts_as_broken(ends):
    connection, its = ends
    its.sendall(b"$7\r\nexp")
    its.close()
    with pytest.raises(ConnectionBroken, match="server closed"):
        read(connection)


def test_a_connection_closed_by_the_client_counts_as_broken(ends):
    connection, _ = ends
    connection.close()
    with pytest.raises(ConnectionBroken):
        read(connection)
    with pytest.raises(ConnectionBroken):
        connection.send(b"PING")


def test_a_reset_connection_counts_as_broken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        its, _ = server.accept()
        with ours:
            # So that it is reset instead of closed in order.
            its.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            its.close()
            with pytest.raises(ConnectionBroken):
                read(connection_on(ours))


def test_a_read_ends_at_the_deadline_whatever_the_sockets_timeout(ends):
    connection, _ = ends
    for seconds in (-1.0, 0.0, 0.05):
        started = clock.now()
        with pytest.raises(errors.TimeoutError):
            connection.read(started + seconds)
        assert clock.now() - started < PATIENCE / 2


def test_data_that_does_not_fit_the_socket_is_sent_when_the_reply_is_read(ends):
    connection, its = ends
    sent = b"x" * 3_000_000
    connection.send(sent)
    assert not connection.is_reusable
    with pytest.raises(errors.TimeoutError):
        connection.read(clock.now() + 0.01)
    received = 0
    while received < len(sent):
        received += len(its.recv(1_000_000))
        if received == len(sent):
            its.sendall(b"+OK\r\n")
        try:
            reply = connection.read(clock.now())
        except errors.TimeoutError:
            pass
    assert reply == b"OK"
    assert connection.is_reusable


# -- at a server ----------------------------------------------------------------------------


def test_g5_an_unexpected_reply_answers_no_call(own_redis):
    backend = backend_for(own_redis.url)
    lease = grant(backend, request())
    pool = pool_of(backend)
    slot, connection = pool.take_idle()
    # A second reply follows the expected one.
    connection.send(b"*1\r\n$4\r\nPING\r\n" * 2)
    connection.read(clock.now() + PATIENCE)
    while connection.is_reusable:
        connection._received += socket_of(connection).recv(100)
    pool.keep(connection)
    slot.release()
    assert renew(backend, lease) == ["renewed"]
    assert release(backend, lease) == "released"


def test_after_an_error_the_connection_is_kept(own_redis):
    backend = backend_for(own_redis.url)
    release(backend, grant(backend, request("warm")))
    with client(own_redis) as asking:
        asking.set(backend._commands.keys.locks + "name", "a stranger's")
        before = asking.info("stats")["total_connections_received"]
        for _ in range(3):
            with pytest.raises(BackendUnavailable, match="WRONGTYPE"):
                grant(backend, request())
        assert asking.info("stats")["total_connections_received"] == before


def test_replies_are_read_through_tls(tls_redis, certificates):
    options = {"connection_kwargs": {"ssl_ca_certs": str(certificates[2])}}
    backend = backend_for(tls_redis.url, options=options)
    names = [f"{number}:" + "n" * 200 for number in range(500)]
    for name in names:
        grant(backend, request(name, metadata="m" * 500))
    assert {info.name for info in backend.list()} == set(names)
