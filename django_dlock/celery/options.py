"""The options of a ``LockedTask``: read from its class once, and refused if they are wrong."""

from __future__ import annotations

import datetime as dt
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

from celery import Task
from celery.contrib.django.task import DjangoTask
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from kombu import serialization

from .. import conf
from ..backends.base import Capability
from ..core.options import DEFAULT, Default, Seconds
from ..handler import locks
from ..keys import ALL_ARGUMENTS, Key, compile_key
from ..records import payloads
from ..text.names import plain
from .spelling import refuse_unknown

CHOICES: Mapping[str, tuple[object, ...]] = {
    "if_contended": ("requeue", "wait", "skip", "fail"),
    "if_unavailable": ("requeue", "fail", "local", "skip"),
    "if_lost": ("abort", "finish"),
    "if_duplicate": ("return", "skip", "fail"),
    "unique_until": (None, "start", "done"),
    **dict.fromkeys(
        (
            *("atomic", "store_result", "store_arguments"),
            *("lock_across_retries", "acks_late", "reject_on_worker_lost"),
        ),
        (True, False),
    ),
}
UNIQUE_TTL = 3600.0
"""Seconds, if the task does not set ``unique_ttl``."""
OF_THE_LOCK = ("lock_ttl", "lock_wait", "lock_max_hold", "lock_min_hold", "lock_across_retries")
OF_THE_RECORD = ("atomic", "idempotency_scope", "idempotency_payload")
NEEDED = (
    ("idempotency_key", "an idempotency_key", OF_THE_RECORD),
    (
        "lock_key",
        "a lock, but lock_key is None (no exclusion)",
        (*OF_THE_LOCK, "idempotency_key", "unique_until"),
    ),
    ("unique_until", "unique_until='start' or 'done'", ("unique_ttl",)),
)
"""An option, its name in messages, and the options that mean nothing without it."""
NEEDS: Mapping[str, Capability] = {
    "lock_min_hold": "min_hold",
    "lock_across_retries": "parking",
    "unique_until": "reservations",
}
"""Options, and the capability that each needs from the backend."""

KeyOption: TypeAlias = str | Sequence[str] | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """The options of the idempotency record."""

    key: Key
    payload: Key
    scope: str
    ttl: dt.timedelta
    using: str


@dataclass(frozen=True, slots=True)
class UniqueOptions:
    """The options of de-duplication when a task is published.

    Attributes:
        key: Tasks with the same key are duplicates. With a record, its key and payload, because
            work that is recorded separately may share a lock; else the lock's key.
        until: ``"start"`` or ``"done"``.
        ttl: Seconds, in addition to a countdown.
    """

    key: Key
    until: str
    ttl: float


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """The options of one task that are converted; all others are validated and stay on the task.

    Attributes:
        lock_key: ``None`` for a task without a lock.
        lock: Arguments of ``Lock`` that were set on the task.
        contention_timeout: Seconds; ``None`` if the task does not set it.
        record: ``None`` for a task without an idempotency key.
        unique: ``None`` for a task that is always published.
    """

    lock_key: Key | None
    lock: Mapping[str, Any]
    contention_timeout: float | None
    record: RecordOptions | None
    unique: UniqueOptions | None

    @classmethod
    def read(cls, task: type[Task[Any, Any]], name: str | None) -> TaskOptions:
        """The options of a task class.

        Raises:
            ImproperlyConfigured: The message names the option, its value and what is allowed.
        """
        reader = _Reader(task, name or str(task.__name__))
        try:
            return reader.read()
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(str(error)) from error


class _Reader:
    def __init__(self, task: type[Task[Any, Any]], name: str) -> None:
        self.task, self.name = task, name
        self.signature = _signature(task)

    def what(self, option: str) -> str:
        return f"{option} of task {self.name!r}"

    def refuse(self, option: str, why: str) -> NoReturn:
        raise ValueError(f"{self.what(option)} is {self.value(option)!r}{why}")

    def value(self, option: str) -> Any:
        return getattr(self.task, option)

    def is_set(self, option: str) -> bool:
        value = self.value(option)
        return not (value is None or value is False or isinstance(value, Default))

    def read(self) -> TaskOptions:
        self.check_body()
        refuse_unknown(self.task, TaskWithOptions, self.what)
        self.check_choices()
        self.check_sets()
        record = self.record() if self.is_set("idempotency_key") else None
        lock_key = self.lock_key(record)
        return TaskOptions(
            lock_key=lock_key,
            lock=self.lock(),
            contention_timeout=self.seconds_or_none("contention_timeout"),
            record=record,
            unique=self.unique(lock_key, record),
        )

    # -- what is wrong -----------------------------------------------------------------

    def check_body(self) -> None:
        """Refuse a body that Celery only creates and does not run."""
        # Not unwrapped: a decorator may wait for the coroutine. Celery's own for ``autoretry_for``
        # does not, and keeps the body here.
        body = getattr(self.task, "_orig_run", self.task.run)
        if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
            kind, cure = "an async def", "call async_to_sync(...) in a plain function"
        elif inspect.isgeneratorfunction(body):
            kind, cure = "a generator, since it has a yield", "return a list"
        else:
            return
        raise ValueError(
            f"The body of task {self.name!r} is {kind}: Celery would create it, run none of it, "
            f"and report success; {cure}"
        )

    def check_choices(self) -> None:
        for option, allowed in CHOICES.items():
            value = self.value(option)
            # 1 equals ``True``, but is not allowed.
            if value not in allowed or (True in allowed and not isinstance(value, bool)):
                *some, last = map(repr, allowed)
                self.refuse(option, f"; it takes {', '.join(some)} or {last}")
        attempts = self.value("max_attempts")
        if type(attempts) is not int or attempts < 1:
            self.refuse("max_attempts", "; it takes a whole number of at least 1")

    def check_sets(self) -> None:
        """Refuse sets of options that contradict each other."""
        for needed, text, options in NEEDED:
            for option in options if self.value(needed) is None else ():
                if self.is_set(option):
                    self.refuse(option, f", which needs {text}; leave {option} out, or set both")
        if self.is_set("idempotency_key"):
            for option in ("acks_late", "reject_on_worker_lost"):
                if not self.value(option):
                    self.refuse(
                        option,
                        ", but it has an idempotency_key: a run that dies would never be "
                        f"redelivered; set {option}=True",
                    )

    # -- values ------------------------------------------------------------------------

    def seconds(self, option: str, minimum: float = 0.0, *, above: bool = False) -> float:
        return conf.seconds(
            self.value(option), what=self.what(option), minimum=minimum, above=above
        )

    def seconds_or_none(self, option: str) -> float | None:
        return None if self.value(option) is None else self.seconds(option)

    def text(self, option: str) -> str:
        value = self.value(option)
        if not isinstance(value, str) or not 1 <= len(value) <= 255:
            self.refuse(option, "; it takes a string of 1 to 255 characters")
        return plain(value)

    def compile(self, option: str, spec: Any, prefix: str) -> Key:
        return compile_key(
            spec,
            self.signature,
            what=self.what(option),
            prefix=prefix,
            normalise=_after_serialization(self.task.serializer),
        )

    def lock_key(self, record: RecordOptions | None) -> Key | None:
        spec = self.value("lock_key")
        if spec is None:
            return None
        if isinstance(spec, Default):
            if record is not None:
                return record.key
            spec = ALL_ARGUMENTS
        return self.compile("lock_key", spec, self.name)

    def alias(self) -> str:
        using = self.text("lock_using")
        # A system check reports wrong settings. It sees only tasks that were registered.
        if conf.problems():
            return using
        if using not in conf.aliases():
            known = ", ".join(map(repr, conf.aliases()))
            self.refuse("lock_using", f", which DLOCKS does not define; it defines {known}")
        for option, capability in NEEDS.items():
            if self.value(option):
                locks[using].require(capability, self.what(option))
        return using

    def lock(self) -> dict[str, Any]:
        found: dict[str, Any] = {"using": self.alias()}
        for option, minimum in (("ttl", 0.1), ("max_hold", 0.1), ("min_hold", 0.0)):
            if self.is_set(f"lock_{option}"):
                found[option] = self.seconds(f"lock_{option}", minimum)
        self.check_ttl(found.get("ttl"), found["using"])
        # Here ``None`` is a value: wait for ever.
        if self.value("lock_wait") is not DEFAULT:
            found["wait"] = self.seconds_or_none("lock_wait")
        return found

    def check_ttl(self, ttl: float | None, using: str) -> None:
        if ttl is None or conf.problems():
            return
        timeout = conf.alias_options(using).command_timeout
        if not conf.can_be_renewed(ttl, timeout):
            self.refuse(
                "lock_ttl",
                ", but the lock is renewed, which needs at least 3 times the command_timeout of "
                f"alias {using!r}, {3 * timeout:g} s: raise lock_ttl, or lower "
                f"DLOCKS[{using!r}]['OPTIONS']['command_timeout']",
            )

    def record(self) -> RecordOptions:
        scope = self.text("idempotency_scope") if self.is_set("idempotency_scope") else self.name
        using = self.text("idempotency_using")
        if using not in connections:
            known = ", ".join(map(repr, connections))
            self.refuse("idempotency_using", f", which DATABASES does not define: {known}")
        return RecordOptions(
            key=self.compile("idempotency_key", self.value("idempotency_key"), scope),
            payload=self.payload(),
            scope=scope,
            ttl=dt.timedelta(seconds=self.seconds("idempotency_ttl", above=True)),
            using=using,
        )

    def unique(self, key: Key | None, record: RecordOptions | None) -> UniqueOptions | None:
        if key is None or self.value("unique_until") is None:
            return None
        ttl = UNIQUE_TTL
        if self.value("unique_ttl") is not None:
            ttl = self.seconds("unique_ttl", above=True)
        until = self.value("unique_until")
        return UniqueOptions(key if record is None else _work_of(record), until, ttl)

    def payload(self) -> Key:
        names = self.value("idempotency_payload")
        if names is None:
            return self.compile("idempotency_payload", ALL_ARGUMENTS, "")
        if isinstance(names, str) or callable(names):
            self.refuse("idempotency_payload", "; it takes a list of argument names")
        if not names:
            return lambda args, kwargs: ""
        return self.compile("idempotency_payload", names, "")


class TaskWithOptions(DjangoTask):  # type: ignore[type-arg] # no generic at run time
    """A task with validated options; the modules below ``LockedTask`` know it under this type."""

    abstract = True

    lock_key: KeyOption | Default | None = DEFAULT
    lock_ttl: Seconds | None = None
    lock_wait: Seconds | Default | None = DEFAULT
    lock_max_hold: Seconds | Default = DEFAULT
    lock_min_hold: Seconds | None = None
    lock_using: str = "default"
    if_contended: Literal["requeue", "wait", "skip", "fail"] = "requeue"
    contention_timeout: Seconds | None = None
    if_unavailable: Literal["requeue", "fail", "local", "skip"] = "requeue"
    if_lost: Literal["abort", "finish"] = "abort"
    lock_across_retries: bool = False
    idempotency_key: KeyOption | None = None
    idempotency_scope: str | None = None
    idempotency_payload: Sequence[str] | None = None
    idempotency_ttl: Seconds = 7 * 24 * 3600.0
    idempotency_using: str = "default"
    store_result: bool = True
    store_arguments: bool = True
    max_attempts: int = 5
    if_duplicate: Literal["return", "skip", "fail"] = "return"
    atomic: bool = False
    unique_until: Literal["start", "done"] | None = None
    unique_ttl: Seconds | None = None

    @functools.cached_property
    def dlock_options(self) -> TaskOptions:
        """The validated options; the same for all runs of the task."""
        return TaskOptions.read(type(self), self.name)


def _work_of(record: RecordOptions) -> Key:
    """A key of record and payload: the worker must see, and refuse, another payload."""

    def key(args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        made = record.key(args, kwargs)
        # Keyed, because the names of locks are shown and logged.
        return f"{made}:{payloads.keyed(record.scope, made, record.payload(args, kwargs))}"

    return key


def _signature(task: type[Task[Any, Any]]) -> inspect.Signature:
    """The signature of the body, without ``self``."""
    signature = inspect.signature(task.run)
    if isinstance(inspect.getattr_static(task, "run"), staticmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


_PLAIN = (str, int, float, bool, type(None))


def _after_serialization(serializer: str) -> Callable[[Any], Any]:
    """A function that returns a value as a worker receives it."""

    def normalise(value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        content_type, encoding, data = serialization.dumps(value, serializer)
        return serialization.loads(data, content_type, encoding, accept=[content_type])

    return normalise
