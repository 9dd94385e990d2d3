"""One session at ZooKeeper: a ``KazooClient``, what it answers by a deadline, and how it ends.

kazoo has a thread that reads and writes, and that reconnects by itself. It reports changes of the
session on that thread, which must not block.

Requests are carried out in the order in which they were made, also across a new connection: one
that was made later never overtakes one whose connection broke.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from django.views.decorators.debug import sensitive_variables
from kazoo.client import KazooClient
from kazoo.exceptions import AuthFailedError, KazooException, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.serialization import Connect
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from ... import clock
from ..alias import AliasOptions
from ..shared.keepalive import keep_alive
from .config import ZooKeeperOptions, client_arguments, root_of

VALID = 0.5
"""The part of the session's timeout for which a lease is good. The leading server's last sign
of this process may be up to a third of the timeout, and half a tick, older than the last answer:
the server that gave that answer may have died before it told the leader."""

Listener = Callable[["Session", str], None]
"""Told ``suspended`` or ``lost`` on the client's thread; never blocks."""


class NoAnswer(Exception):
    """There is no connection, or no answer on it, by the deadline."""


class _LastWarning(logging.Filter):
    """Remembers why kazoo does not connect, because kazoo writes that only to its log."""

    text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.text = record.getMessage()
        return True


class Session:
    """See the module.

    Attributes:
        id: Of the session; 0 while there is none.
        timeout: Seconds for which the server keeps a silent session; it may be less than asked.
        ended: The client has given up; another session is needed.
        refused: It has given up because the server did not accept our credentials.
    """

    @sensitive_variables("arguments", "secured")
    def __init__(self, options: AliasOptions, own: ZooKeeperOptions, listener: Listener) -> None:
        self.pid = os.getpid()
        self.root = root_of(options)
        self.id = 0
        self.timeout = 0.0
        self.ended = self.refused = self.prepared = False
        self._command_timeout = options.command_timeout
        self._listener = listener
        self._warning = _LastWarning()
        # ``getLogger`` would keep it, and its filter, for ever.
        logger = logging.Logger("kazoo.client")  # noqa: LOG001
        logger.parent = logging.getLogger("kazoo.client")
        logger.addFilter(self._warning)
        arguments = client_arguments(options, own)
        handler = SequentialThreadingHandler()
        self.client: Any = KazooClient(**arguments, handler=handler, logger=logger)
        secured = self.client.auth_data or arguments.get("sasl_options")
        acl = CREATOR_ALL_ACL if secured else OPEN_ACL_UNSAFE
        self.client.default_acl = arguments.get("default_acl") or acl
        self._bound_connects(handler)
        # Set while there is a connection, and when there will be none.
        self._settled = threading.Event()
        self.client.add_listener(self._changed)
        self.client.start_async()

    def _bound_connects(self, handler: Any) -> None:
        """Give each server one ``command_timeout`` to answer, and note the timeout it grants.

        kazoo would wait for one silent server until the session is over, and tells nobody what
        was granted.
        """
        connection, create = self.client._connection, handler.create_connection
        invoke = connection._invoke

        def create_connection(*args: Any, **kwargs: Any) -> Any:
            kwargs["timeout"] = min(kwargs["timeout"], self._command_timeout)
            made = create(*args, **kwargs)
            keep_alive(made, self._command_timeout)
            return made

        def noting(timeout: float, request: Any, xid: int | None = None) -> Any:
            if not isinstance(request, Connect):
                return invoke(timeout, request, xid)
            answer = invoke(min(timeout, self._command_timeout), request, xid)
            if answer[0].time_out > 0:
                self.timeout = answer[0].time_out / 1000
            return answer

        handler.create_connection, connection._invoke = create_connection, noting

    # -- state -------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._settled.is_set() and not self.ended

    @property
    def validity(self) -> float:
        """Seconds for which a lease is good, from when a confirmed write was asked for."""
        return self.timeout * VALID

    @property
    def trouble(self) -> str:
        """The last warning in the client's log."""
        return self._warning.text

    def connect(self, deadline: float) -> None:
        """Wait for the connection.

        Raises:
            AuthFailedError: The server does not accept our credentials.
            NoAnswer: None by the deadline.
        """
        settled = self._settled.wait(max(0.0, deadline - clock.now()))
        if self.refused:
            raise AuthFailedError
        if not settled or self.ended:
            # An error in the first connection ends the client without an event.
            self.ended = self.ended or self.client._connection.connection_stopped.is_set()
            raise NoAnswer(self.trouble or "no connection")

    def _changed(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self.id = self.client.client_id[0]
            self._settled.set()
            return
        self._settled.clear()
        if state == KazooState.SUSPENDED:
            # A server that has lost its data would refuse a client that has seen newer data, and
            # never say that the session is over. No read here relies on what was seen before.
            self.client.last_zxid = 0
            self._listener(self, "suspended")
            return
        # Before anybody is told, so that nothing more is granted in this session.
        self.id = 0
        if self.client.client_state in (KeeperState.AUTH_FAILED, KeeperState.CLOSED):
            # The client does not try again by itself.
            self.refused = self.client.client_state == KeeperState.AUTH_FAILED
            self.ended = True
            self._settled.set()
        self._listener(self, "lost")

    # -- requests ----------------------------------------------------------------------

    def create(self, path: str, data: bytes) -> Any:
        """Send the request; its answer is path and state. The node ends with the session."""
        return self.client.create_async(path, data, ephemeral=True, include_data=True)

    def beat(self) -> Any:
        """Send a write, which only a majority of the servers can confirm; its answer is a state.

        Reads are answered by one server, which may have lost the others without knowing it.
        """
        return self.client.set_async(self.root, b"")

    def answer(self, request: Any, deadline: float) -> Any:
        """Wait for the answer to a request.

        Raises:
            NoAnswer: None by the deadline.
            KazooException: What the server answered, or that the connection broke.
        """
        asked_at = clock.now()
        try:
            return request.get(timeout=max(0.0, deadline - asked_at))
        except KazooTimeoutError as error:
            if clock.now() - asked_at >= self._command_timeout / 2:
                self._drop_connection()
            raise NoAnswer("no answer") from error

    def answer_or_none(self, request: Any, deadline: float) -> Any:
        """As ``answer``; ``None`` if there is no such node."""
        try:
            return self.answer(request, deadline)
        except NoNodeError:
            return None

    def ask_status(self, command: bytes) -> str:
        """The server's answer to a command of four letters; empty if it gives none."""
        try:
            # On a connection of its own, which waits one ``command_timeout`` for the server.
            return str(self.client.command(command))
        except (OSError, KazooException, KazooTimeoutError):
            return ""

    def delete(self, path: str, deadline: float) -> None:
        """Delete a node, if it is there."""
        self.answer_or_none(self.client.delete_async(path), deadline)

    def _drop_connection(self) -> None:
        """Let the client try another server: this one does not answer.

        By itself it would do so only after two thirds of the session's timeout.
        """
        connection = self.client._connection
        with contextlib.suppress(OSError, AttributeError):
            connection._socket.shutdown(socket.SHUT_RDWR)

    # -- the end -----------------------------------------------------------------------

    def close(self, patience: float) -> None:
        """End the session, and so every node of it; waits for that no longer than ``patience``."""
        self.client.remove_listener(self._changed)
        closing = threading.Thread(target=self._stop, name="dlock-zookeeper-close", daemon=True)
        # While the interpreter ends, no thread can start.
        with contextlib.suppress(RuntimeError):
            closing.start()
            closing.join(max(0.0, patience))

    def _stop(self) -> None:
        with contextlib.suppress(Exception):
            self.client.stop()
        with contextlib.suppress(Exception):
            self.client.close()

    def forget(self) -> None:
        """Leave the session to the parent; runs in a forked child, which has none of its threads.

        Closing the child's copy of the socket does not touch the parent's connection.
        """
        atexit.unregister(self.client.handler.stop)
        connection = self.client._connection
        for one in (connection._socket, connection._read_sock, connection._write_sock):
            with contextlib.suppress(OSError, AttributeError):
                one.close()
