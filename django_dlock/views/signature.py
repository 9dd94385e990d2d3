"""What a view is: its signature, its name, and whether it is awaited, however it was made."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from asgiref.sync import iscoroutinefunction

from ..decorators import full_name


def _class_based(request: Any, *args: Any, **kwargs: Any) -> None:
    """Has the signature of every class-based view."""


CLASS_BASED = inspect.signature(_class_based)


def signature_of(view: Callable[..., Any], decorator: str) -> inspect.Signature:
    """The signature of a view, with its first parameter renamed to ``request``.

    Raises:
        TypeError: It is a method of a class.
    """
    # The apparent signature of these begins with self.
    if is_made_by_class(view) or _partial_in(view):
        return CLASS_BASED
    parameters = list(inspect.signature(view).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        return CLASS_BASED
    first, *others = parameters
    if first.name == "self" or any(other.name == "request" for other in others):
        own = inspect.signature(view, follow_wrapped=False).parameters
        if next(iter(own), "") == "request":
            # The function of another library's decorator, which makes the instance itself.
            return CLASS_BASED
        raise TypeError(
            f"{decorator} on {full_name(view)}: on a method, use "
            f"@method_decorator({decorator[1:]}(...))"
        )
    return inspect.Signature([first.replace(name="request"), *others])


def is_made_by_class(view: Callable[..., Any]) -> bool:
    """Whether it comes from ``as_view()`` of Django or of a ``ViewSet``."""
    return hasattr(view, "view_class") or hasattr(view, "cls")


def _partial_in(view: Callable[..., Any]) -> functools.partial[Any] | None:
    """The partial of a bound method that ``method_decorator`` passes, below other decorators."""
    inner = inspect.unwrap(view, stop=lambda inner: isinstance(inner, functools.partial))
    if not isinstance(inner, functools.partial):
        return None
    # A partial of a function below another decorator has the signature that it shows.
    return inner if inner is view or isinstance(inner.func, MethodType) else None


def name_of(view: Callable[..., Any]) -> str:
    """The full name of a view; for a class-based view, that of its class."""
    ninja = used_ninja()
    if ninja and (operation := ninja.operation_of(view)):
        return full_name(operation.view_func)
    if method := method_of(view):
        return _class_name(type(method.__self__))
    if partial := _partial_in(view):
        return full_name(partial.func)
    cls = getattr(view, "view_class", None) or getattr(view, "cls", None)
    return _class_name(cls) if cls else full_name(view)


def method_of(view: Callable[..., Any]) -> MethodType | None:
    """The bound method that the decorator was given by ``method_decorator``, if it was."""
    method = partial.func if (partial := _partial_in(view)) else None
    return method if isinstance(method, MethodType) else None


def _class_name(cls: type) -> str:
    """The full name of a class, also of one that was renamed, as REST framework's ``api_view``."""
    renamed = cls.__qualname__.rpartition(".")[2] != cls.__name__
    return f"{cls.__module__}.{cls.__name__}" if renamed else full_name(cls)


def is_async(view: Callable[..., Any]) -> bool:
    """Whether the view has to be awaited."""
    if iscoroutinefunction(view):
        return True
    # ``dispatch`` of an async class-based view is a plain method that returns a coroutine.
    method = view.func if isinstance(view, functools.partial) else view
    return getattr(getattr(method, "__self__", None), "view_is_async", False) is True


def used_ninja() -> ModuleType | None:
    """The module about django-ninja, in a process that has loaded it."""
    # Not the package alone: a tool for builds is also called ninja.
    if "ninja.operation" not in sys.modules:
        return None
    from . import ninja

    return ninja
