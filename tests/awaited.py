"""The Redis backend as coroutines use it, for tests that were written for threads."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.redis import RedisBackend
from django_dlock.backends.redis_async import METHODS


class LoopThread:
    """An event loop that runs on a thread of its own until it is stopped."""

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
        """Its result; whatever interrupts the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop as ``asyncio.run`` does."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)


class AwaitedRedisBackend(RedisBackend):
    """Its methods await their twins on one event loop, whoever calls them."""

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        assert self._coroutines is not None, "nothing would be awaited"
        self._thread: LoopThread | None = None
        self._starting = threading.Lock()

    def _await(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._starting:
            thread = self._thread = self._thread or LoopThread()
        return thread.run(self.acall(method, *args, **kwargs))

    def after_fork(self) -> None:
        super().after_fork()
        self._thread, self._starting = None, threading.Lock()

    def close(self) -> None:
        super().close()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()


for _method in METHODS:
    setattr(
        AwaitedRedisBackend, _method, functools.partialmethod(AwaitedRedisBackend._await, _method)
    )
