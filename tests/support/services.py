"""Proxies that refuse what hosted services refuse, in front of a real server.

A proxy changes requests only: in the place of what it refuses, the server gets something that it
refuses itself. So replies keep their order, also among messages and in pipelines.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import threading
from collections.abc import Callable, Collection
from typing import final


class _Rewriting:
    """A TCP proxy that hands each client's bytes to a function of its own."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._open: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def rewriter(self) -> Callable[[bytes], bytes]:
        """A function that takes what a client sent, and returns what the server gets."""
        raise NotImplementedError

    def __enter__(self):  # type: ignore[no-untyped-def]
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._close(self._server, *self._open)

    @staticmethod
    def _close(*sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open += [client, server]
                if self._closed:
                    # Accepted while the others were closed.
                    self._close(client, server)
                    return
                for source, target, change in (
                    (client, server, self.rewriter()),
                    (server, client, bytes),
                ):
                    args = (source, target, change)
                    threading.Thread(target=self._pump, args=args, daemon=True).start()

    @staticmethod
    def _pump(
        source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if changed := change(data):
                    target.sendall(changed)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


# Runs before a script; ``refused`` answers in the place of the server.
_SHIM = """
local real, declared = redis, {}
for _, key in ipairs(KEYS) do declared[key] = true end
local function refused(...)
  local words = {...}
  local command = string.upper(words[1])
  %s
  if command ~= 'TIME' and command ~= 'PUBSUB' and command ~= 'PUBLISH' then
    for i = 2, command == 'EXISTS' and #words or 2 do
      if not declared[words[i]] then
        return {err = 'ERR script tried accessing undeclared key ' .. tostring(words[i])}
      end
    end
  end
end
local redis = setmetatable({
  pcall = function(...) return refused(...) or real.pcall(...) end,
  call = function(...)
    local answer = refused(...)
    if answer and answer.err then error(answer.err) end
    return answer or real.call(...)
  end,
}, {__index = real})
"""
_COUNTS = {
    "right": "",
    "none": "if command == 'PUBSUB' then return {words[3], 0} end",
    "refused": "if command == 'PUBSUB' then return {err = 'ERR unknown command PUBSUB'} end",
    "deaf": "if command == 'PUBLISH' then real.pcall(...) return 0 end",
}


@final
class RedisService(_Rewriting):
    """A Redis as services offer it: scripts touch declared keys only, and are soon forgotten.

    Args:
        refuses: Commands, such as ``WAIT``.
        counts: What scripts are told about subscribers: the ``right`` number, ``none`` although
            there are some, or that the question is ``refused``; with ``deaf``, ``PUBLISH`` answers
            that nobody has received a message that was received.
    """

    def __init__(self, port: int, *, refuses: Collection[str], counts: str = "right") -> None:
        self._refuses, self._shim = set(refuses), (_SHIM % _COUNTS[counts]).encode()
        self._calls = 0
        self._sha_of: dict[bytes, bytes] = {}
        super().__init__(port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def rewriter(self) -> Callable[[bytes], bytes]:
        buffer = b""

        def rewrite(data: bytes) -> bytes:
            nonlocal buffer
            buffer += data
            changed = b""
            while (found := _words(buffer)) is not None:
                words, buffer = found
                words = self._changed(words)
                parts = [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
                changed += b"*%d\r\n" % len(words) + b"".join(parts)
            return changed

        return rewrite

    def _changed(self, words: list[bytes]) -> list[bytes]:
        command = words[0].upper().decode()
        if command in self._refuses:
            return [b"REFUSED-" + words[0]]
        if command == "EVAL":
            source = self._shim + words[1]
            self._sha_of[_sha(words[1])] = _sha(source)
            return [words[0], source, *words[2:]]
        if command == "EVALSHA":
            self._calls += 1
            # Every third script is on another machine, which does not know it. One that the server
            # has from a client beside the proxy would answer what this service does not.
            known = self._sha_of.get(words[1]) if self._calls % 3 else None
            return [words[0], known or b"0" * 40, *words[2:]]
        return words


def _sha(source: bytes) -> bytes:
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


def _words(buffer: bytes) -> tuple[list[bytes], bytes] | None:
    """The words of the first command, and the rest; ``None`` until it is complete."""
    head, end, rest = buffer.partition(b"\r\n")
    if not end:
        return None
    words: list[bytes] = []
    for _ in range(int(head[1:])):
        size, end, rest = rest.partition(b"\r\n")
        if not end or len(rest) < int(size[1:]) + 2:
            return None
        words.append(rest[: int(size[1:])])
        rest = rest[int(size[1:]) + 2 :]
    return words, rest


@final
class SharedSessions(_Rewriting):
    """A pooler of PostgreSQL that refuses statements.

    Args:
        refuses: Beginnings of statements, such as ``PREPARE``.
    """

    def __init__(self, port: int, *, refuses: Collection[str]) -> None:
        self._refuses = [word.encode() for word in refuses]
        super().__init__(port)

    def rewriter(self) -> Callable[[bytes], bytes]:
        buffer, started = b"", False

        def rewrite(data: bytes) -> bytes:
            nonlocal buffer, started
            buffer += data
            changed = b""
            while True:
                at = 1 if started else 0
                if len(buffer) < at + 4:
                    return changed
                (size,) = struct.unpack_from("!i", buffer, at)
                if len(buffer) < at + size:
                    return changed
                kind, body = buffer[:at], buffer[at + 4 : at + size]
                buffer = buffer[at + size :]
                if not started:
                    # A client may first ask for encryption.
                    started = struct.unpack_from("!i", body) == (3 << 16,)
                elif kind in (b"Q", b"P"):
                    body = self._changed(kind, body)
                changed += kind + struct.pack("!i", len(body) + 4) + body

        return rewrite

    def _changed(self, kind: bytes, body: bytes) -> bytes:
        # A message to parse has a name before the statement, and types after it.
        name, text, rest = body.split(b"\0", 2) if kind == b"P" else (b"", *body.split(b"\0", 1))
        for statement in text.split(b";"):
            for refused in self._refuses:
                if statement.strip().upper().startswith(refused):
                    text = (
                        b"DO $$BEGIN RAISE EXCEPTION '%b is not supported by this pooler' "
                        b"USING ERRCODE = '0A000'; END$$" % refused
                    )
        return (name + b"\0" if kind == b"P" else b"") + text + b"\0" + rest
