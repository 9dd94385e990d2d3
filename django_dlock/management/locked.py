"""``LockedCommand``: a management command that never runs twice at the same time."""

from __future__ import annotations

import inspect
import keyword
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser, OutputWrapper

from .. import conf
from ..core.options import Default, Seconds
from ..exceptions import (
    BackendRefused,
    BackendUnavailable,
    InvalidLockBackend,
    LeaseLost,
    LockNotAcquired,
)
from ..keys import KeySpec, compile_key, template_of
from ..lock import DEFAULT, Lock, of_template

TRY_AGAIN = 75
"""``EX_TEMPFAIL`` of ``sysexits.h``: nothing was done, and another attempt may succeed."""
WRONG_USAGE = 2


class LockedCommand(BaseCommand):
    """A command whose ``handle`` runs under a lock; also a mixin for other base commands.

    A run that does not get its lock prints one line and ends with ``contended_exit_code``,
    without a traceback. SIGTERM ends a run like ``sys.exit``, so that its lock is released.

    Attributes:
        lock_key: A template over the command's options (``"import:{feed}"``), a list of option
            names, or a static method that gets the options; by default the command's module.
        lock_ttl, lock_max_hold, lock_min_hold, lock_using: As ``ttl``, ``max_hold``, ``min_hold``
            and ``using`` of ``Lock``.
        lock_wait: Seconds to wait for the lock; 0 tries once.
        contended_exit_code: Exit code of a run that did not get its lock. 0 counts as success,
            and ``call_command`` returns ``None``; with any other code, ``call_command`` raises
            ``CommandError``.
        unavailable_exit_code: Exit code if the lock's backend did not answer; nothing was run. If
            it refused (credentials, permissions, settings), the exit code is 1.
        lock: The lock while ``handle`` runs; ``self.lock.check()`` raises if it is lost.
    """

    lock_key: KeySpec | None = None
    lock_ttl: Seconds | None = None
    lock_wait: Seconds | None = 0
    lock_max_hold: Seconds | Default = DEFAULT
    lock_min_hold: Seconds | None = None
    lock_using: str = "default"
    contended_exit_code: int = 0
    unavailable_exit_code: int = TRY_AGAIN
    lock: Lock

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        # Not in add_arguments, which subclasses override without calling super().
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.add_argument(
            "--lock-wait",
            type=float,
            metavar="SECONDS",
            help="Wait for the lock this long; 0 tries once.",
        )
        parser.add_argument(
            "--contended-exit-code",
            type=int,
            metavar="CODE",
            help="End with this code, 0 to 255, if another run holds the lock "
            f"(default: {self.contended_exit_code}).",
        )
        return parser

    def execute(self, *args: Any, **options: Any) -> str | None:
        wait, code = options.pop("lock_wait", None), options.pop("contended_exit_code", None)
        try:
            if wait is not None:
                wait = conf.seconds(wait, what="--lock-wait")
            if code is not None:
                code = int(code)
                _check_exit_code(code, what="--contended-exit-code")
        except (TypeError, ValueError) as error:
            raise CommandError(f"Not run: {error}", returncode=WRONG_USAGE) from error
        _check_exit_code(self.contended_exit_code, what="contended_exit_code")
        _check_exit_code(self.unavailable_exit_code, what="unavailable_exit_code")
        try:
            self.lock, began = self._make_lock(options, wait), False
        except InvalidLockBackend as error:
            # The system checks would report this, but they run later.
            raise CommandError(f"Not run: {error}") from error
        try:
            with _released_at_sigterm(), self.lock:
                began = True
                return super().execute(*args, **options)
        except LockNotAcquired as error:
            if began:
                raise
            self._tell_contention(
                error, self.contended_exit_code if code is None else code, options
            )
        except BackendRefused as error:
            if began:
                raise
            # ``unavailable_exit_code`` asks for another attempt, which would be refused as well.
            raise CommandError(f"Not run: {error}") from error
        except BackendUnavailable as error:
            if began:
                raise
            raise CommandError(
                f"Not run: {error}", returncode=self.unavailable_exit_code
            ) from error
        except LeaseLost as error:
            if (error.name, error.alias) != (self.lock.name, self.lock.alias):
                raise
            raise CommandError(f"The lock was lost during the run: {error}") from error
        return None

    def _make_lock(self, options: dict[str, Any], wait: float | None) -> Lock:
        module = type(self).__module__
        name, template = module, ""
        if self.lock_key is not None:
            # Only options with valid parameter names can be arguments of the key.
            known = {
                option: value
                for option, value in options.items()
                if option.isidentifier() and not keyword.iskeyword(option)
            }
            parameters = [inspect.Parameter(o, inspect.Parameter.KEYWORD_ONLY) for o in known]
            key = compile_key(
                self.lock_key,
                inspect.Signature(parameters),
                what=f"lock_key of the command {module}",
                prefix=module,
            )
            name, template = key((), known), template_of(key)
        lock = Lock(
            name,
            ttl=self.lock_ttl,
            wait=self.lock_wait if wait is None else wait,
            max_hold=self.lock_max_hold,
            min_hold=self.lock_min_hold,
            using=self.lock_using,
            metadata={"path": f"manage.py {module.rpartition('.')[2]}"},
        )
        return of_template(lock, template)

    def _tell_contention(self, error: LockNotAcquired, code: int, options: dict[str, Any]) -> None:
        if code:
            raise CommandError(f"Not run: {error}", returncode=code) from error
        if options.get("verbosity", 1):
            given = options.get("stderr")
            stderr = self.stderr if given is None else OutputWrapper(given)
            # In plain style, because this is not an error.
            stderr.write(f"Not run: {error}", lambda text: text)


def _check_exit_code(code: Any, *, what: str) -> None:
    # The system keeps one byte of an exit code, so 256 would be 0, which is success.
    if code not in range(256):
        raise ValueError(f"{what} is {code!r}; it must be from 0 to 255")


@contextmanager
def _released_at_sigterm() -> Iterator[None]:
    """Let SIGTERM raise ``SystemExit``; by default it ends the process without a release.

    The first process of a container would even ignore it.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    # The exit code that shells use for a process ended by SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
