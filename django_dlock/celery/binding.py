"""What a task's class gets when it is registered, so that its body runs only inside a delivery.

Celery calls ``before_start`` for each delivery, also for one that is requeued; and the tracer calls
the class's own ``__call__``, which may pass ``LockedTask`` by.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from celery import Task

from .canvas import items
from .first_call import FirstCall
from .options import TaskWithOptions


def wrapper_of(kind: type[Any], ours: type[TaskWithOptions]) -> type[Any] | None:
    """The first class before ``ours`` that defines a ``__call__``; Celery calls that one."""
    before = kind.__mro__[: kind.__mro__.index(ours)]
    return next((each for each in before if "__call__" in vars(each)), None)


def bypasses(wrapper: type[Any]) -> bool:
    """Whether the ``__call__`` of this class never mentions that of another one.

    ``False`` for a function whose code cannot be read; the guard of the body finds those.
    """
    code = getattr(inspect.unwrap(vars(wrapper)["__call__"]), "__code__", None)
    return code is not None and "__call__" not in set(_names(code))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def bind_body(kind: type[TaskWithOptions], ours: type[TaskWithOptions]) -> None:
    """Let ``before_start`` wait for the body, and refuse a body that passes ``ours`` by."""
    if kind.before_start is not Task.before_start:
        _defer_before_start(kind)
    wrapper = wrapper_of(kind, ours)
    if wrapper is not None:
        _guard_body(kind, wrapper.__qualname__)


def call_before_start(task: TaskWithOptions, args: Any, kwargs: Any) -> None:
    """Call the task's own ``before_start``, if it has one, as Celery does."""
    if type(task).before_start is not Task.before_start:
        task.before_start(task.request.id or "", args, kwargs)


def _defer_before_start(kind: type[TaskWithOptions]) -> None:
    own = inspect.getattr_static(kind, "before_start")
    if hasattr(own, "_dlock_defers"):
        return
    function = own.__func__ if isinstance(own, staticmethod | classmethod) else own

    @functools.wraps(function)
    def before_start(self: TaskWithOptions, *args: Any, **kwargs: Any) -> None:
        request = self.request
        # Celery calls it before ``__call__``, when nobody knows whether the body will run.
        if request.called_directly or FirstCall.of(request) is not None:
            own.__get__(self, kind)(*args, **kwargs)

    before_start._dlock_defers = True  # type: ignore[attr-defined]
    kind.before_start = before_start  # type: ignore[method-assign, assignment]


def _guard_body(kind: type[TaskWithOptions], wrapper: str) -> None:
    own = inspect.getattr_static(kind, "run")
    static = isinstance(own, staticmethod)
    function: Any = own.__func__ if static else own
    if "run" in vars(kind) and hasattr(function, "_dlock_guards"):
        # It was bound before. That of a base class looks at the requests of the base class.
        return

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _may_run(kind):
            raise RuntimeError(
                f"The body of task {kind.name!r} was not run: {wrapper}.__call__ calls "
                "self.run(), which takes no lock and keeps no record. Call "
                "super().__call__(*args, **kwargs) there"
            )
        return function(*args, **kwargs)

    run._dlock_guards = True  # type: ignore[attr-defined]
    kind.run = staticmethod(run) if static else run  # type: ignore[method-assign]


def _may_run(kind: type[TaskWithOptions]) -> bool:
    """Whether the body was called by its delivery, or directly."""
    request: Any = kind.request_stack.top
    if request is None or request.called_directly:
        return not items.is_item(kind)
    call = FirstCall.of(request)
    return call is not None and call.running
