"""What a subscription brings, in whatever pieces it comes."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import redis

from django_dlock.backends.redis_ear import Ear

CHANNEL = "dlock:µ"
PONG = b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
PATIENCE = 10.0
SOON = 0.001


def message(text: bytes) -> bytes:
    channel = CHANNEL.encode()
    head = b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n" % (len(channel), channel)
    return head + b"$%d\r\n%b\r\n" % (len(text), text)


@pytest.fixture
def ends() -> Iterator[tuple[Ear, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        yield Ear(SimpleNamespace(_sock=ours), CHANNEL), its


STREAM = message(b"first 1 2") + PONG + message(b"") + message(b"line\r\n*3") + PONG


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
def test_g5_nothing_is_lost_wherever_it_is_cut(ends, cut):
    ear, its = ends
    its.sendall(STREAM[:cut])
    heard = ear.hear(PATIENCE)
    its.sendall(STREAM[cut:])
    assert [*heard, *ear.hear(PATIENCE)] == [b"first 1 2", b"", b"line\r\n*3"]


def test_g5_nothing_is_lost_that_comes_byte_by_byte(ends):
    ear, its = ends
    heard = []
    for byte in STREAM:
        its.sendall(bytes([byte]))
        heard += ear.hear(PATIENCE)
    assert heard == [b"first 1 2", b"", b"line\r\n*3"]


def test_silence_is_none_and_an_answer_to_a_ping_is_not(ends):
    ear, its = ends
    assert ear.hear(SOON) is None
    assert ear.hear(-1.0) is None
    its.sendall(PONG)
    assert ear.hear(PATIENCE) == []


@pytest.mark.parametrize(
    "sent",
    [
        b"-NOAUTH Authentication required.\r\n",
        b"*3\r\n$11\r\nunsubscribe\r\n",
        message(b"x").replace(CHANNEL.encode(), b"dlock:xx"),
        message(b"x").replace(b"$1\r\n", b"$one\r\n"),
    ],
    ids=["error", "other", "another channel", "no length"],
)
def test_what_is_no_message_of_the_channel_is_a_break(ends, sent):
    ear, its = ends
    its.sendall(sent)
    with pytest.raises(redis.ConnectionError, match="not a message"):
        ear.hear(PATIENCE)


def test_a_closed_connection_is_a_break(ends):
    ear, its = ends
    its.close()
    with pytest.raises(redis.ConnectionError, match="server closed"):
        ear.hear(PATIENCE)
    ear.connection._sock = None
    with pytest.raises(redis.ConnectionError, match="is closed"):
        ear.hear(PATIENCE)


def test_a_message_that_is_too_long_is_a_break_before_it_is_read(ends):
    ear, its = ends
    its.sendall(message(b"x" * 100).replace(b"$100\r\n", b"$70000\r\n"))
    with pytest.raises(redis.ConnectionError, match="a message of 70000 bytes"):
        ear.hear(PATIENCE)


def test_a_network_that_fails_is_a_break():
    class Cut:
        def settimeout(self, seconds: float) -> None: ...

        def recv(self, size: int) -> bytes:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

    with pytest.raises(redis.ConnectionError, match="No route to host"):
        Ear(SimpleNamespace(_sock=Cut()), CHANNEL).hear(PATIENCE)


def test_it_reads_what_a_server_says(own_redis):
    connection = redis.Connection(port=own_redis.port, protocol=2)
    connection.send_command("SUBSCRIBE", CHANNEL)
    connection.read_response()
    ear = Ear(connection, CHANNEL)
    with redis.Redis.from_url(own_redis.url) as client:
        client.publish(CHANNEL, "said")
        assert ear.hear(PATIENCE) == [b"said"]
        connection.send_command("PING")
        assert ear.hear(PATIENCE) == []
    connection.disconnect()
