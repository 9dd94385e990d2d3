"""Connections to one member of etcd, shared by the threads of this process.

The rules are those of ``backends/shared/pool.py``; only the number of calls is not limited.
"""

from __future__ import annotations

import ssl
from typing import NoReturn

from urllib3.connection import HTTPConnection, HTTPSConnection

from ... import clock
from ..shared.keepalive import keep_alive
from ..shared.pool import Connections
from .config import Member

MOST_KEPT = 16
"""Connections that are kept for later calls."""

CutTls = ssl.SSLEOFError | ssl.SSLZeroReturnError
"""Errors of TLS because the connection was cut, not because the certificates are wrong."""


class NotConnected(Exception):
    """The member cannot be reached, so it has not received the call. ``__cause__`` says why."""


class Link:
    """A connection of urllib3, already connected, for one call after another."""

    def __init__(self, http: HTTPConnection) -> None:
        self.http, self.heard_at = http, 0.0

    @property
    def is_reusable(self) -> bool:
        """Whether the member has neither closed it nor sent more than the answer."""
        return self.http.is_connected

    def close(self) -> None:
        self.http.close()


class Pool(Connections[Link]):
    """See the module.

    Args:
        timeout: Seconds for connecting; an attempt that takes longer ends by itself.
    """

    def __init__(self, member: Member, tls: ssl.SSLContext | None, timeout: float) -> None:
        self.member, self._tls, self._timeout = member, tls, timeout
        super().__init__(self._open)

    def take(self, deadline: float) -> Link:
        """A connection, which the caller must ``keep`` or close."""
        now = clock.now()
        while (link := self.idle.take(now)) is not None:
            if link.is_reusable:
                return link
            link.close()
        return self.connect(deadline)

    def keep(self, connection: Link) -> None:
        if len(self.idle) < MOST_KEPT:
            super().keep(connection)
        else:
            connection.close()

    def _open(self) -> Link:
        host, port, timeout = self.member.host, self.member.port, self._timeout
        if self._tls is None:
            http = HTTPConnection(host, port, timeout=timeout)
        else:
            http = HTTPSConnection(host, port, timeout=timeout, ssl_context=self._tls)
        try:
            http.connect()
        except Exception as error:
            http.close()
            cut = isinstance(error, ConnectionResetError | CutTls)
            hint = " (does it serve TLS?)" if cut and self._tls is not None else ""
            raise NotConnected(f"{self.member} cannot be reached{hint}: {error}") from error
        keep_alive(http.sock, timeout)
        return Link(http)

    def _too_slow(self) -> NoReturn:
        raise NotConnected(f"{self.member} does not accept a connection in time")
