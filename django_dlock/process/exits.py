"""What a process does when it ends normally: a main process, a forked child, a child of a pool."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

_hooks: dict[Callable[[], object], int] = {}
"""Each hook, and the pid of the process that has registered it."""
_finalizer: Any = None


def at_exit(hook: Callable[[], object]) -> None:
    """Call ``hook`` when this process ends; a forked child has to register it again.

    Hooks run in reverse order, as with ``atexit``. Registering one twice has no further effect.
    """
    global _finalizer
    if _hooks.get(hook) != os.getpid():
        _hooks.pop(hook, None)
        _hooks[hook] = os.getpid()
        # Again in a child: multiprocessing of Python 3.13 has it forget what was registered.
        atexit.unregister(run_exit_hooks)
        atexit.register(run_exit_hooks)
    # Children of a pool skip atexit but run these finalizers; those of billiard are the same. At
    # their start they discard the ones that were registered right after the fork.
    util, known = sys.modules.get("multiprocessing.util"), _finalizer
    if util is not None and (known is None or not known.still_active()):
        _finalizer = util.Finalize(None, _run_as_finalizer, exitpriority=100)


def run_exit_hooks() -> None:
    """Run all hooks of this process now, for a process that ends with ``os._exit``."""
    pid = os.getpid()
    for hook, registered_by in reversed(list(_hooks.items())):
        if registered_by == pid:
            hook()


def _run_as_finalizer() -> None:
    """Run the hooks once the other threads have ended, without waiting for them here.

    Before Python 3.13, a child of ``multiprocessing`` runs its finalizers when its main function
    returns, and only then waits for its threads, which may still work under their locks. A child of
    billiard does not wait for them.
    """
    is_child = sys.modules["multiprocessing.process"].parent_process() is not None
    if is_child and _working_threads():
        try:
            # The child waits for this one, too.
            threading.Thread(target=_run_after_others, name="dlock-exit", daemon=False).start()
            return
        except RuntimeError:
            # No thread can start any more.
            pass
    run_exit_hooks()


def _run_after_others() -> None:
    # Again, because a thread may have started others.
    while others := _working_threads():
        others[0].join()
    run_exit_hooks()


def _working_threads() -> list[threading.Thread]:
    """The threads for which the end of the process waits, besides this one."""
    not_these = (threading.current_thread(), threading.main_thread())
    return [one for one in threading.enumerate() if not one.daemon and one not in not_these]
