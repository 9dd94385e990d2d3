"""Reads what is said on one channel, off a connection that redis-py has made and subscribed with.

A letter stands between a release there and an acquire here. redis-py's own reader is made for
every reply there is; what a subscription brings has two forms, and less is to be done for them.
"""

from __future__ import annotations

from typing import Any

from redis import exceptions as errors

__all__ = ["Ear"]

SHORTEST = 0.001
"""Seconds; 0 would be another mode of a socket, which TLS has no use for."""

LONGEST = 65536
"""Bytes of a message; of ours none has a hundredth."""

_PONG = b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"


class Ear:
    """See the module; for one thread at a time.

    Args:
        connection: Nothing else is read from it, nor was anything asked but the subscription.
    """

    def __init__(self, connection: Any, channel: str) -> None:
        self.connection = connection
        name = channel.encode()
        self._form = b"*3\r\n$7\r\nmessage\r\n$%d\r\n%b\r\n" % (len(name), name)
        self._rest = b""

    def hear(self, seconds: float) -> list[bytes] | None:
        """What was said, perhaps nothing yet, or the answer to a PING; ``None`` for silence.

        Raises:
            redis.exceptions.ConnectionError: It hears no more.
        """
        # Not a part of redis-py's public face, but what each of its parsers reads from.
        sock = self.connection._sock
        if sock is None:
            raise errors.ConnectionError("the subscription's connection is closed")
        sock.settimeout(max(SHORTEST, seconds))
        try:
            data = sock.recv(LONGEST)
        except TimeoutError:
            return None
        except OSError as error:
            raise errors.ConnectionError(f"the subscription's connection broke: {error}") from error
        if not data:
            raise errors.ConnectionError("the server closed the subscription's connection")
        return self._messages(self._rest + data if self._rest else data)

    def _messages(self, data: bytes) -> list[bytes]:
        form, at, messages = self._form, 0, []
        while at < len(data):
            if not data.startswith(form, at):
                if data.startswith(_PONG, at):
                    at += len(_PONG)
                    continue
                left = data[at : at + len(form)]
                if form.startswith(left) or _PONG.startswith(left):
                    break
                raise errors.ConnectionError(f"not a message of the subscription: {left!r}")
            head, _, rest = data[at + len(form) :].partition(b"\r\n")
            if not rest:
                break
            if not (head[:1] == b"$" and head[1:].isdigit()):
                raise errors.ConnectionError(f"not a message of the subscription: {data!r}")
            length = int(head[1:])
            if length > LONGEST:
                raise errors.ConnectionError(f"a message of {length} bytes on the subscription")
            if len(rest) < length + 2:
                break
            messages.append(rest[:length])
            at += len(form) + len(head) + 2 + length + 2
        self._rest = data[at:]
        return messages
