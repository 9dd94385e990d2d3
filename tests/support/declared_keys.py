"""Reads ``MONITOR`` while tests run, and finds keys that a script touches without declaring them.

A server that runs scripts of several keys at the same time, or spreads keys over several servers,
refuses such a script or locks all keys for it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

import redis

from django_dlock.backends.redis.commands import EXACTLY
from testproject.servers import RedisServer
from tests.support.redis_calls import client

_LINE = re.compile(rb"^\+[\d.]+ \[\d+ ([^\]]+)\] (.*)$")
_WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\(x[0-9a-f]{2}|.)")
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b"}


@contextlib.contextmanager
def all_keys_declared(server: RedisServer) -> Iterator[None]:
    """Fail at the end if a script has touched a key that its caller had not declared."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as monitor:
        monitor.sendall(b"MONITOR\r\n")
        assert monitor.recv(5) == b"+OK\r\n"
        chunks: list[bytes] = []
        end = secrets.token_hex(8)
        reader = threading.Thread(target=_read, args=(monitor, chunks, end.encode()), daemon=True)
        reader.start()
        yield
        with client(server) as asking:
            asking.echo(end)
            reader.join(60)
            assert not reader.is_alive()
            keys_of = _Places(asking)
            found = set(_undeclared(b"".join(chunks), keys_of))
    assert not found, f"undeclared keys: {sorted(found)[:10]}"


def _read(monitor: socket.socket, chunks: list[bytes], end: bytes) -> None:
    monitor.settimeout(None)
    last = b""
    while end not in last:
        chunks.append(monitor.recv(1 << 16))
        if not chunks[-1]:
            return
        # The end may come in two parts.
        last = b"".join(chunks[-2:])


class _Places:
    """Where the keys of a command are among its words, as the server says."""

    def __init__(self, asking: redis.Redis) -> None:
        self._commands: Any = asking.command()

    def __call__(self, words: list[str]) -> list[str]:
        facts = self._commands[words[0].lower()]
        first, last, step = (
            facts[fact] for fact in ("first_key_pos", "last_key_pos", "step_count")
        )
        if not first:
            return []
        return words[first : len(words) + last + 1 if last < 0 else last + 1 : step]


def _undeclared(lines: bytes, keys_of: _Places) -> Iterator[tuple[str, str]]:
    """Each (command, key); a script's commands follow its call."""
    declared: list[str] = []
    for line in lines.split(b"\r\n"):
        if not (match := _LINE.match(line)):
            continue
        words = [_plain(word) for word in _WORD.findall(match[2])]
        if match[1] == b"lua":
            for key in set(keys_of(words)).difference(declared):
                yield words[0], key
        elif words[0].upper() in ("EVAL", "EVALSHA"):
            declared = words[3 : 3 + int(words[2])]


def _plain(word: bytes) -> str:
    return _ESCAPE.sub(_unescaped, word).decode(*EXACTLY)


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if code[:1] == b"x" and len(code) == 3:
        return bytes([int(code[1:], 16)])
    return _LETTERS.get(code, code)
