"""``locks``: alias → backend, one instance per process.

Django's ``BaseConnectionHandler`` has one instance per thread, but here the watchdog and the holder
are different threads. So backends are thread-safe and shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from django.utils.module_loading import import_string

from . import conf, process
from .backends.base import BaseLockBackend, StoreSwitch
from .lease import LeaseInfo

__all__ = ["LockHandler", "locks"]


class LockHandler:
    """``locks["default"]`` is the backend of that alias; it is built on first use.

    Attributes:
        on_break, on_switch: What backends call as their ``report_break`` and ``report_switch``.
    """

    on_break: Callable[[str, str, str, LeaseInfo | None], object] = staticmethod(
        lambda alias, name, owner, info: None
    )
    on_switch: Callable[[StoreSwitch], object] = staticmethod(lambda switch: None)

    def __init__(self) -> None:
        self._backends: dict[str, BaseLockBackend] = {}
        # Reentrant: a signal handler may come here while its thread is building a backend.
        self._lock = threading.RLock()

    def __getitem__(self, alias: str) -> BaseLockBackend:
        """The alias's backend.

        Raises:
            InvalidLockBackend: No such alias in ``DLOCKS``, or its entry is wrong.
        """
        process.notice_fork()
        try:
            return self._backends[alias]
        except KeyError:
            pass
        with self._lock:
            if alias not in self._backends:
                process.at_fork(after_in_child=self._after_fork)
                self._backends[alias] = self._build(alias)
            return self._backends[alias]

    def __iter__(self) -> Iterator[str]:
        return iter(conf.aliases())

    def reset(self) -> None:
        """Close and discard all backends, because the settings have changed."""
        with self._lock:
            backends, self._backends = self._backends, {}
        for backend in backends.values():
            backend.close()

    def _build(self, alias: str) -> BaseLockBackend:
        # Python imports it when it first connects by a host's name. A child that is forked while
        # another thread connects would wait for that import for ever.
        import encodings.idna  # noqa: F401

        options = conf.alias_options(alias)
        backend: BaseLockBackend = import_string(options.backend)(options)
        backend.other = self.__getitem__
        backend.report_break, backend.report_switch = self._tell_break, self._tell_switch
        return backend

    def _tell_break(self, alias: str, name: str, owner: str, info: LeaseInfo | None) -> None:
        self.on_break(alias, name, owner, info)

    def _tell_switch(self, switch: StoreSwitch) -> None:
        self.on_switch(switch)

    def _after_fork(self) -> None:
        # Another thread of the parent may have held the lock during the fork.
        self._lock = threading.RLock()
        for backend in self._backends.values():
            backend.after_fork()


locks = LockHandler()
