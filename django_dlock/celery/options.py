"""The options of a ``LockedTask``, read from its class once and refused where they are wrong."""

from __future__ import annotations

import datetime as dt
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Task
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from kombu import serialization

from .. import conf
from ..keys import ALL_ARGUMENTS, Key, compile_key
from ..lock_options import DEFAULT, Default

__all__ = ["RecordOptions", "TaskOptions", "UniqueOptions"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "if_contended": ("requeue", "wait", "skip", "fail"),
    "if_unavailable": ("requeue", "fail", "local", "skip"),
    "if_lost": ("abort", "finish"),
    "if_duplicate": ("return", "skip", "fail"),
}
UNIQUE_UNTIL = ("start", "done")
UNIQUE_TTL = 3600.0
"""Seconds, where the task does not say."""
SWITCHES = ("atomic", "store_result", "lock_across_retries", "acks_late", "reject_on_worker_lost")
PREFIXES = ("lock_", "idempotency_", "if_", "unique_")
OF_THE_LOCK = ("lock_ttl", "lock_wait", "lock_max_hold", "lock_min_hold", "lock_across_retries")
OF_THE_RECORD = ("atomic", "idempotency_scope", "idempotency_payload")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What concerns the idempotency record."""

    key: Key
    payload: Key
    scope: str
    ttl: dt.timedelta
    using: str
    store_result: bool
    if_duplicate: str
    atomic: bool


@dataclass(frozen=True, slots=True)
class UniqueOptions:
    """What concerns de-duplication when a task is published.

    Attributes:
        key: Tasks with the same one are the same. Of the record and its payload where there is
            one, for work that is recorded apart may share a lock; else of the lock.
        until: ``"start"`` or ``"done"``.
        ttl: Seconds, besides a countdown.
    """

    key: Key
    until: str
    ttl: float


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """All options of one task, validated.

    Attributes:
        lock_key: ``None`` for a task that excludes nobody.
        lock: Arguments of ``Lock`` that were set on the task.
        max_hold_set: Whether the task says how long it may hold, or its time limit does.
        across_retries: Whether the lock is kept through the countdowns of retries.
        contention_timeout: Seconds.
        max_attempts: Runs that may die in the middle, or be stopped by ``max_hold``.
        record: ``None`` for a task without an idempotency key.
        unique: ``None`` for a task that is published each time.
    """

    lock_key: Key | None
    lock: Mapping[str, Any]
    max_hold_set: bool
    across_retries: bool
    if_contended: str
    contention_timeout: float
    if_unavailable: str
    if_lost: str
    max_attempts: int
    record: RecordOptions | None
    unique: UniqueOptions | None

    @classmethod
    def read(cls, task: type[Task[Any, Any]], name: str | None) -> TaskOptions:
        """The options of a task class.

        Raises:
            ImproperlyConfigured: Naming the option, its value, and what is allowed.
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

    def value(self, option: str) -> Any:
        return getattr(self.task, option)

    def is_set(self, option: str) -> bool:
        value = self.value(option)
        return not (value is None or value is False or isinstance(value, Default))

    def read(self) -> TaskOptions:
        self.check_spelling()
        self.check_choices()
        self.check_sets()
        record = self.record() if self.is_set("idempotency_key") else None
        lock_key = self.lock_key(record)
        return TaskOptions(
            lock_key=lock_key,
            lock=self.lock(),
            max_hold_set=self.is_set("lock_max_hold"),
            across_retries=self.value("lock_across_retries"),
            if_contended=self.value("if_contended"),
            contention_timeout=self.seconds("contention_timeout"),
            if_unavailable=self.value("if_unavailable"),
            if_lost=self.value("if_lost"),
            max_attempts=self.max_attempts(),
            record=record,
            unique=self.unique(lock_key, record),
        )

    # -- what is wrong -----------------------------------------------------------------

    def check_spelling(self) -> None:
        """Refuse ``lock_tll``, which would otherwise be an attribute that nobody reads."""
        base = next(c for c in self.task.__mro__ if "dlock_options" in vars(c))
        known = [option for option in vars(base) if option.startswith(PREFIXES)]
        own = self.task.__mro__[: self.task.__mro__.index(base)]
        for option, value in ((o, v) for c in own for o, v in vars(c).items()):
            if option.startswith(PREFIXES) and option not in known and not callable(value):
                near = difflib.get_close_matches(option, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"{self.what(option)} is no option of LockedTask; {hint}")

    def check_choices(self) -> None:
        for option, allowed in CHOICES.items():
            if self.value(option) not in allowed:
                raise ValueError(
                    f"{self.what(option)} is {self.value(option)!r}; "
                    f"it takes one of {', '.join(map(repr, allowed))}"
                )
        for option in SWITCHES:
            if not isinstance(self.value(option), bool):
                raise TypeError(
                    f"{self.what(option)} is {self.value(option)!r}; it takes True or False"
                )

    def check_sets(self) -> None:
        """Refuse sets of options that contradict each other."""
        if self.is_set("idempotency_key"):
            if self.value("lock_key") is None:
                raise ValueError(
                    f"{self.what('lock_key')} is None (no exclusion), but it has an "
                    "idempotency_key, whose runs must exclude each other; leave lock_key out"
                )
            for option in ("acks_late", "reject_on_worker_lost"):
                if not self.value(option):
                    raise ValueError(
                        f"{self.what(option)} is False, but it has an idempotency_key: a run "
                        f"that dies would never be delivered again; set {option}=True"
                    )
        else:
            for option in OF_THE_RECORD:
                if self.is_set(option):
                    raise ValueError(
                        f"{self.what(option)} is {self.value(option)!r}, which needs an "
                        "idempotency_key; set one, or leave it out"
                    )
        if self.value("lock_key") is None:
            for option in OF_THE_LOCK:
                if self.is_set(option):
                    raise ValueError(
                        f"{self.what(option)} is {self.value(option)!r}, but lock_key is None "
                        "(no exclusion); leave one of them out"
                    )

    # -- values ------------------------------------------------------------------------

    def seconds(self, option: str, minimum: float = 0.0, *, above: bool = False) -> float:
        return conf.seconds(
            self.value(option), what=self.what(option), minimum=minimum, above=above
        )

    def text(self, option: str) -> str:
        value = self.value(option)
        if not isinstance(value, str) or not 1 <= len(value) <= 255:
            raise TypeError(
                f"{self.what(option)} is {value!r}; it takes a string of 1 to 255 characters"
            )
        return value

    def compile(self, option: str, spec: Any, prefix: str) -> Key:
        return compile_key(
            spec,
            self.signature,
            what=self.what(option),
            prefix=prefix,
            normalise=_through(self.task.serializer),
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
        # Wrong settings are told by a system check, which knows tasks only if they registered.
        if not conf.problems() and using not in conf.aliases():
            raise ValueError(
                f"{self.what('lock_using')} is {using!r}, which DLOCKS does not define; it "
                f"defines {', '.join(map(repr, conf.aliases()))}"
            )
        return using

    def lock(self) -> dict[str, Any]:
        found: dict[str, Any] = {"using": self.alias()}
        for option in ("lock_ttl", "lock_max_hold"):
            if self.is_set(option):
                found[option.removeprefix("lock_")] = self.seconds(option, 0.1)
        if self.value("lock_min_hold") is not None:
            found["min_hold"] = self.seconds("lock_min_hold")
        # ``None`` is a value here: wait for ever.
        if self.value("lock_wait") is not DEFAULT:
            found["wait"] = None if self.value("lock_wait") is None else self.seconds("lock_wait")
        return found

    def record(self) -> RecordOptions:
        scope = self.text("idempotency_scope") if self.is_set("idempotency_scope") else self.name
        using = self.text("idempotency_using")
        if using not in connections:
            raise ValueError(
                f"{self.what('idempotency_using')} is {using!r}, which DATABASES does not "
                f"define; it defines {', '.join(map(repr, connections))}"
            )
        return RecordOptions(
            key=self.compile("idempotency_key", self.value("idempotency_key"), scope),
            payload=self.payload(),
            scope=scope,
            ttl=dt.timedelta(seconds=self.seconds("idempotency_ttl", above=True)),
            using=using,
            store_result=self.value("store_result"),
            if_duplicate=self.value("if_duplicate"),
            atomic=self.value("atomic"),
        )

    def unique(self, key: Key | None, record: RecordOptions | None) -> UniqueOptions | None:
        until, ttl = self.value("unique_until"), self.value("unique_ttl")
        if until is None:
            if ttl is not None:
                raise ValueError(
                    f"{self.what('unique_ttl')} is {ttl!r}, which needs unique_until='start' or "
                    "'done'; set one, or leave it out"
                )
            return None
        if until not in UNIQUE_UNTIL:
            raise ValueError(
                f"{self.what('unique_until')} is {until!r}; it takes None or one of "
                f"{', '.join(map(repr, UNIQUE_UNTIL))}"
            )
        if key is None:
            raise ValueError(
                f"{self.what('unique_until')} is {until!r}, but lock_key is None (no exclusion): "
                "nothing tells which tasks are the same; leave one of them out"
            )
        seconds = UNIQUE_TTL if ttl is None else self.seconds("unique_ttl", above=True)
        return UniqueOptions(key if record is None else _work_of(record), until, seconds)

    def max_attempts(self) -> int:
        attempts = self.value("max_attempts")
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise ValueError(
                f"{self.what('max_attempts')} is {attempts!r}; it takes a whole number of at "
                "least 1"
            )
        return attempts

    def payload(self) -> Key:
        names = self.value("idempotency_payload")
        if names is None:
            return self.compile("idempotency_payload", ALL_ARGUMENTS, "")
        if isinstance(names, str) or callable(names):
            raise TypeError(
                f"{self.what('idempotency_payload')} is {names!r}; it takes a list of argument "
                "names"
            )
        if not names:
            return lambda args, kwargs: ""
        return self.compile("idempotency_payload", names, "")


def _work_of(record: RecordOptions) -> Key:
    """The key of work: another payload under the same record is an error that must be told."""

    def key(args: Sequence[Any], kwargs: Mapping[str, Any], /) -> str:
        return f"{record.key(args, kwargs)}:{record.payload(args, kwargs)}"

    return key


def _signature(task: type[Task[Any, Any]]) -> inspect.Signature:
    """The signature of the body, without the task itself."""
    signature = inspect.signature(task.run)
    if isinstance(inspect.getattr_static(task, "run"), staticmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


_PLAIN = (str, int, float, bool, type(None))


def _through(serializer: str) -> Callable[[Any], Any]:
    """What becomes of a value on its way through a queue."""

    def normalise(value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        content_type, encoding, data = serialization.dumps(value, serializer)
        return serialization.loads(data, content_type, encoding, accept=[content_type])

    return normalise
