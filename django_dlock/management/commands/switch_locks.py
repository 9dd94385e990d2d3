"""``manage.py switch_locks``: show or switch the active store of an alias with fail-over."""

from __future__ import annotations

import contextlib
import getpass
import time
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error

from ...backends.failover import FailoverBackend
from ...backends.failover.active import FEW_EPOCHS
from ...backends.failover.record import Reading, SwitchRefused
from ...backends.failover.rules import quiet_after
from ...exceptions import BackendUnavailable, InvalidLockBackend
from ...handler import locks
from ...text.printable import printable
from ..base import FAILED, OperatorCommand

PAUSE = 0.2


class Command(OperatorCommand):
    help = (
        "Show which of its two stores an alias with fail-over uses, or switch to the other one. "
        "After a switch, held locks are not renewed any more, and nothing is granted until all of "
        "them are over."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--to", metavar="STORE", help="Switch to this alias of DLOCKS.")
        parser.add_argument(
            "--using",
            default="default",
            metavar="ALIAS",
            help="The alias with fail-over (default: default).",
        )
        parser.add_argument(
            "--wait", action="store_true", help="Return only when locks can be acquired again."
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="Switch even if the store grants no lock that is tried there first.",
        )
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        backend = self._backend(options["using"])
        told = "The record cannot be read"
        try:
            reading = backend.read_record()
            if options["to"] == reading.active:
                # A script that repeats the command must not end the locks that are held now.
                text = f"{options['to']!r} is active already; nothing was changed."
                self.stderr.write(text, style_func=str)
            elif options["to"] is not None:
                if not options["force"]:
                    self._try(backend, reading, options["to"])
                told = "The switch is not confirmed"
                self._switch(backend, reading, options["to"])
                told = "The switch was made, but the record cannot be read any more"
                reading = backend.read_record()
            while options["wait"] and _quiet_left(reading) > 0:
                time.sleep(min(PAUSE, _quiet_left(reading)))
                reading = backend.read_record()
        except (Error, TimeoutError, SwitchRefused) as error:
            raise CommandError(f"{told}: {printable(str(error))}", returncode=FAILED) from error
        self._show(options["using"], reading, options["format"])

    def _backend(self, alias: str) -> FailoverBackend:
        try:
            known = list(locks)
            if alias not in known:
                self.wrong_usage(f"There is no alias {alias!r} in DLOCKS; it defines {known}.")
            backend = locks[alias]
        except InvalidLockBackend as error:
            raise CommandError(str(error), returncode=FAILED) from error
        if not isinstance(backend, FailoverBackend):
            self.wrong_usage(
                f"Alias {alias!r} has one store only, {type(backend).__name__}; --using takes an "
                "alias with the fail-over backend."
            )
        return backend

    def _try(self, backend: FailoverBackend, reading: Reading, to: str) -> None:
        try:
            backend.try_store(to, reading)
        except ValueError as error:
            self.wrong_usage(f"{error}.")
        except BackendUnavailable as error:
            text = (
                f"Not switched: after it, {to!r} would grant no lock. {error}. --force switches "
                "nevertheless."
            )
            raise CommandError(printable(text), returncode=FAILED) from error

    def _switch(self, backend: FailoverBackend, reading: Reading, to: str) -> None:
        try:
            backend.switch(to, reading, reason="switch_locks", by=_user())
        except ValueError as error:
            self.wrong_usage(f"{error}.")

    def _show(self, alias: str, reading: Reading, output_format: str) -> None:
        left = _quiet_left(reading)
        if output_format == "json":
            self.print_json(
                {
                    "alias": alias,
                    "active": reading.active,
                    "epoch": reading.epoch,
                    "switched_ago": reading.elapsed,
                    "reason": reading.reason,
                    "switched_by": reading.switched_by,
                    "quiet_left": left,
                    "epochs_left": reading.epochs_left,
                }
            )
            return
        by = f" by {reading.switched_by}" if reading.switched_by else ""
        why = f"; switched{by}: {reading.reason}" if reading.reason else ""
        text = f"{alias}: {reading.active} is active (epoch {reading.epoch}{why})."
        # The record may have been written by another program.
        self.stdout.write(printable(text))
        if reading.epochs_left < FEW_EPOCHS:
            self.stdout.write(f"It can be switched only {reading.epochs_left} more times.")
        if left:
            self.stdout.write(f"Nothing is granted for another {left:.0f} s.")


def _quiet_left(reading: Reading) -> float:
    return max(0.0, quiet_after(reading) - max(0.0, reading.elapsed))


def _user() -> str:
    # In a container, the user may have no name.
    with contextlib.suppress(Exception):
        return getpass.getuser()
    return ""
