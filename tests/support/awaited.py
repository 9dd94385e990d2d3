"""Backends as coroutines use them, for tests that were written for threads."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.local import LocalBackend
from django_dlock.backends.redis import RedisBackend

METHODS = ("acquire", "wait", "renew", "release", "cancel_acquire", "locked", "break_silently")
"""The methods that coroutines await; the other methods of a backend are for operators."""


class _Call:
    """One coroutine on the loop, with its caller on another thread.

    This does not use ``run_coroutine_threadsafe``: an interrupt can leave a Future's Condition
    locked, and then the loop waits for it forever.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine, self._given_up = coroutine, False
        self.task: asyncio.Task[Any] | None = None
        self.ended = threading.Lock()
        self.ended.acquire()

    def start(self) -> None:
        if self._given_up:
            self._coroutine.close()
            return
        self.task = asyncio.ensure_future(self._coroutine)
        self.task.add_done_callback(self._end)

    def give_up(self) -> None:
        self._given_up = True
        if self.task is not None:
            self.task.cancel()

    def _end(self, task: asyncio.Task[Any]) -> None:
        if self._given_up and not task.cancelled():
            # Nobody waits any more, and the loop need not log an error about it.
            task.exception()
        self.ended.release()


class LoopThread:
    """An event loop that runs on a separate thread until it is stopped."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="test-loop", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._stopped.wait()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run it and return its result; an interrupt of the caller cancels it."""
        call = _Call(coroutine)
        try:
            self._loop.call_soon_threadsafe(call.start)
            call.ended.acquire()
        except BaseException:
            self._loop.call_soon_threadsafe(call.give_up)
            raise
        assert call.task is not None
        return call.task.result()

    def stop(self) -> None:
        """End the loop as ``asyncio.run`` does."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)


class Awaited:
    """A mixin for a backend class: its methods await those of ``awaited`` on one event loop.

    ``awaited`` is another backend of that class.
    """

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)  # type: ignore[call-arg]
        order: Any = type(self).__mro__
        self.awaited = order[order.index(Awaited) + 1](options)
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()

    def _await(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._starting:
            thread = self._thread = self._thread or LoopThread()
        if method == "wait":
            return thread.run(self.awaited.async_wait(*args, **kwargs))
        return thread.run(self.awaited.acall(getattr(self.awaited, method), *args, **kwargs))

    def deregister(self, process: str, *, deadline: float) -> None:
        # Only a backend that has been used has a heartbeat or a session to end.
        self.awaited.deregister(process, deadline=deadline)

    def after_fork(self) -> None:
        self.awaited.after_fork()
        super().after_fork()  # type: ignore[misc]
        self._thread, self._starting = None, threading.Lock()

    def close(self) -> None:
        self.awaited.close()
        super().close()  # type: ignore[misc]
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()


for _method in METHODS:
    setattr(Awaited, _method, functools.partialmethod(Awaited._await, _method))


class AwaitedLocalBackend(Awaited, LocalBackend):
    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        # Both are one store.
        self.awaited.__dict__ = self.__dict__


class AwaitedRedisBackend(Awaited, RedisBackend):
    """The same for coroutines."""
