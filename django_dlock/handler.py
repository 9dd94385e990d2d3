"""``locks``: alias → backend, one instance per process.

Not Django's ``BaseConnectionHandler``: that keeps an instance per thread, and the watchdog is
another thread than the holder's. Backends are thread-safe instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

from django.utils.module_loading import import_string

from . import conf, queueing
from .backends.base import BaseLockBackend
from .exceptions import InvalidLockBackend

__all__ = ["LockHandler", "locks"]


class LockHandler:
    """``locks["default"]`` is the backend of that alias, built at first use."""

    def __init__(self) -> None:
        self._backends: dict[str, BaseLockBackend] = {}
        # Reentrant: a signal handler may lock while its own thread builds the first backend.
        self._lock = threading.RLock()
        self._hooked = False

    def __getitem__(self, alias: str) -> BaseLockBackend:
        """The alias's backend.

        Raises:
            InvalidLockBackend: No such alias in ``DLOCKS``, or its entry is wrong.
        """
        try:
            return self._backends[alias]
        except KeyError:
            pass
        with self._lock:
            if alias not in self._backends:
                self._hook()
                self._backends[alias] = self._build(alias)
            return self._backends[alias]

    def __iter__(self) -> Iterator[str]:
        return iter(conf.aliases())

    def all(self) -> list[BaseLockBackend]:
        """The backends of all configured aliases."""
        return [self[alias] for alias in self]

    def reset(self) -> None:
        """Forget all backends; the settings have changed."""
        with self._lock:
            backends, self._backends = self._backends, {}
        for backend in backends.values():
            backend.close()

    def _build(self, alias: str) -> BaseLockBackend:
        options = conf.alias_options(alias)
        try:
            backend_class: Any = import_string(options.backend)
        except ImportError as error:
            cure = '; pip install "django-dlock[redis]"' if error.name == "redis" else ""
            raise InvalidLockBackend(
                f"DLOCKS[{alias!r}]['BACKEND']: cannot import {options.backend!r}: {error}{cure}"
            ) from error
        if not (isinstance(backend_class, type) and issubclass(backend_class, BaseLockBackend)):
            raise InvalidLockBackend(
                f"DLOCKS[{alias!r}]['BACKEND']: {options.backend!r} is not a subclass of "
                "django_dlock.backends.base.BaseLockBackend"
            )
        return backend_class(options)

    def _hook(self) -> None:
        # At first use and not at import: importing the package leaves no trace.
        if not self._hooked and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)
        self._hooked = True

    def _after_fork(self) -> None:
        # Another thread of the parent may have held it at the moment of the fork.
        self._lock = threading.RLock()
        queueing.forget()
        for backend in self._backends.values():
            backend.after_fork()


locks = LockHandler()
