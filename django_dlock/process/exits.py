"""What a process does when it ends normally: a main process, a forked child, a child of a pool."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["at_exit", "run_exit_hooks"]

_hooks: dict[Callable[[], object], int] = {}
"""Each hook, and the pid of the process that has registered it."""
_finalizers: dict[tuple[Callable[[], object], str], Any] = {}


def at_exit(hook: Callable[[], object]) -> None:
    """Call ``hook`` when this process ends; a forked child has to register it again.

    Hooks run in reverse order, as with ``atexit``. Registering one twice has no further effect.
    """
    pid = os.getpid()
    if _hooks.get(hook) != pid:
        _hooks[hook] = pid
        # The parent's registration may have been inherited.
        atexit.unregister(hook)
        atexit.register(hook)
    for module in ("multiprocessing.util", "billiard.util"):
        # Children of a pool skip atexit but run these finalizers. At their start they discard the
        # ones that were registered right after the fork.
        util, known = sys.modules.get(module), _finalizers.get((hook, module))
        if util is not None and (known is None or not known.still_active()):
            _finalizers[hook, module] = util.Finalize(None, hook, exitpriority=100)


def run_exit_hooks() -> None:
    """Run all hooks of this process now, for a process that ends with ``os._exit``."""
    pid = os.getpid()
    for hook, registered_by in reversed(list(_hooks.items())):
        if registered_by == pid:
            hook()
