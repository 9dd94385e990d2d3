"""Talks to all nodes at the same time, on one thread for all callers of a process.

A thread per node and call would cost more than the commands, and a caller that waited for the nodes
one after the other would wait for the slowest. Here a caller hands over its commands and sleeps
until enough nodes have answered. The thread ends after a minute without a command.
"""

from __future__ import annotations

import math
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from redis import exceptions as errors

from ... import clock
from ...log import logger
from .node import Job, Node

T = TypeVar("T")

IDLE = 60.0
"""Seconds without a command after which the thread ends."""
CLOSING = 2.0
"""Seconds that ``close`` waits for the thread."""


class Exchange:
    """See the module."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        for node in nodes:
            node.wake = self._wake
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._inbox: list[tuple[Node, Job]] = []
        self._thread: threading.Thread | None = None
        self._is_closing = False
        # Whatever is sent to the second wakes the thread, which reads the first.
        self._waker: tuple[socket.socket, socket.socket] | None = None
        # Reentrant: a finalizer or a signal handler may call this on a thread that is inside it.
        self._lock = threading.RLock()

    def after_fork(self) -> None:
        """Discard everything without a message to the nodes; runs in a forked child."""
        waker = self._waker
        for node in self._nodes:
            # redis-py closes only the child's own descriptor. Nobody in the child waits.
            if node.link is not None:
                node.link.close()
            node.forget()
        for end in waker or ():
            end.close()
        self._begin_anew()

    def submit(self, jobs: Sequence[tuple[Node, Job]], is_over: Callable[[], bool]) -> None:
        """Have commands sent; each job's ``answer`` is called on the thread.

        Args:
            is_over: Whether the caller has got what it needs.
        """
        with self._lock:
            self._inbox += jobs
            if self._thread is not None and self._thread.is_alive():
                self._wake()
                return
            self._waker = waker = socket.socketpair()
            for end in waker:
                end.setblocking(False)
            self._thread = threading.Thread(
                target=self._run, args=(waker[0],), name="dlock-redlock", daemon=True
            )
            try:
                self._thread.start()
                return
            except RuntimeError:
                # No thread can start while the interpreter ends; send a last release from here.
                self._thread = None
        self._run(waker[0], is_over)

    def close(self) -> None:
        """Close all connections; a later command opens new ones."""
        with self._lock:
            thread = self._thread
            if thread is None:
                return
            self._is_closing = True
            self._wake()
        if thread is not threading.current_thread():
            thread.join(CLOSING)

    # -- the thread --------------------------------------------------------------------

    def _run(self, alarm: socket.socket, is_over: Callable[[], bool] = lambda: False) -> None:
        try:
            self._serve_all(alarm, is_over)
        except BaseException:
            # Nobody may wait for a thread that has ended; the next command starts another one.
            logger.exception("Redlock: the thread that talks to the nodes failed")
            self._is_closing = True
            self._end()

    def _serve_all(self, alarm: socket.socket, is_over: Callable[[], bool]) -> None:
        idle_since = clock.now()
        while True:
            with self._lock:
                arrived, self._inbox = self._inbox, []
            for node, job in arrived:
                node.add(job)
            now, wake_at = clock.now(), math.inf
            for node in self._nodes:
                wake_at = min(wake_at, self._serve(node, node.step) or math.inf)
            if any(node.is_busy for node in self._nodes):
                idle_since = now
            else:
                wake_at = min(wake_at, idle_since + IDLE)
            if (self._is_closing or now >= idle_since + IDLE or is_over()) and self._end():
                return
            self._receive(alarm, wake_at)

    def _end(self) -> bool:
        """Close everything; returns ``False`` if there is a new command, unless it must close."""
        with self._lock:
            if self._inbox and not self._is_closing:
                return False
            self._is_closing, self._thread = False, None
            waker, self._waker = self._waker, None
            inbox, self._inbox = self._inbox, []
            for node, job in inbox:
                node.add(job)
            # This answers all commands, so that nobody waits for them.
            for node in self._nodes:
                node.close(errors.ConnectionError("the backend was closed"))
            for end in waker or ():
                end.close()
        return True

    def _serve(self, node: Node, call: Callable[[float], T]) -> T | None:
        now = clock.now()
        try:
            return call(now)
        except Exception as error:
            # One node's trouble must not end the thread that serves all of them.
            logger.exception("Redlock: node %s failed", node.address)
            node.broke(error, now)
            return None

    def _receive(self, alarm: socket.socket, until: float) -> None:
        """Sleep until a node has answered, a command arrives, or the time has come."""
        poller = select.poll()
        poller.register(alarm, select.POLLIN)
        links = {}
        for node in self._nodes:
            if node.link is not None:
                sending = select.POLLOUT if node.link.is_sending else 0
                poller.register(node.link, select.POLLIN | sending)
                links[node.link.fileno()] = node
        seconds = max(0.0, until - clock.now())
        # An attempt to connect wakes it when it ends.
        timeout = None if math.isinf(seconds) else math.ceil(seconds * 1000)
        ready = dict(poller.poll(timeout))
        if ready.pop(alarm.fileno(), None):
            try:
                alarm.recv(4096)
            except OSError:
                pass  # Nothing is there.
        for number, event in ready.items():
            if event & ~select.POLLOUT:
                self._serve(links[number], links[number].receive)

    def _wake(self) -> None:
        waker = self._waker
        if waker is not None:
            try:
                waker[1].send(b"\0")
            except OSError:
                pass  # It is awake, or gone.
