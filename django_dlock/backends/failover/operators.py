"""What operators ask of an alias with fail-over: its leases, its stores, and switches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

from ...databases.errors import TablesMissing, migrate_command
from ...exceptions import BackendUnavailable
from ...lease import LeaseInfo, LeasePage, LeaseQuery, Waiter
from ..base import BaseLockBackend, Fact, Problem
from . import rights
from .active import FEW_EPOCHS, ActiveStore
from .config import FailoverOptions
from .record import LAST_EPOCH, Reading
from .terms import Leases, StoreCall, Term

SHOWN_FOR = 86400.0
"""Seconds for which a switch back to the primary is shown; one to the standby stays."""


class OperatorCalls(BaseLockBackend):
    """The part of the backend that no holder of a lease needs."""

    _active: ActiveStore
    _leases: Leases
    _own: FailoverOptions

    # -- leases ------------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        return self._get(name).make()

    def _get(self, name: str) -> StoreCall[LeaseInfo | None]:
        _, term = self._active.open_term(name, self.call_deadline())
        call = partial(term.store.get, name)
        return StoreCall(term.store, call, lambda info: info and _info(term, info))

    def get_many(self, names: Sequence[str]) -> Mapping[str, LeaseInfo]:
        _, term = self._active.open_term("", self.call_deadline())
        return {name: _info(term, info) for name, info in term.store.get_many(names).items()}

    def page(self, query: LeaseQuery, *, offset: int = 0, limit: int | None = None) -> LeasePage:
        _, term = self._active.open_term("", self.call_deadline())
        infos, total = term.store.page(query, offset=offset, limit=limit)
        return LeasePage([_info(term, info) for info in infos], total)

    def waiters(self, name: str, *, limit: int = 100) -> list[Waiter]:
        _, term = self._active.open_term(name, self.call_deadline())
        return term.store.waiters(name, limit=limit)

    def break_silently(self, name: str, *, owner: str, deadline: float | None = None) -> bool:
        return self._break_silently(name, owner=owner, deadline=deadline).make()

    def _break_silently(
        self, name: str, *, owner: str, deadline: float | None = None
    ) -> StoreCall[bool]:
        deadline = deadline or self.call_deadline()
        _, term = self._active.open_term(name, deadline)
        call = partial(term.store.break_silently, name, owner=owner, deadline=deadline)
        return StoreCall(term.store, call)

    def deregister(self, process: str, *, deadline: float) -> None:
        for term in self._leases.terms():
            if term is not self._leases.latest:
                # It may be the store that failed; then its leases end with their TTL.
                with contextlib.suppress(BackendUnavailable):
                    term.store.deregister(process, deadline=deadline)
        if self._leases.latest is not None:
            self._leases.latest.store.deregister(process, deadline=deadline)

    # -- what is wrong, and what is to be known ------------------------------------------

    def store_problems(self) -> Sequence[Problem]:
        # Whatever else is wrong with the stores is reported for their own aliases.
        database = self._active.record.database
        try:
            reading = self._active.read_record(self.command_timeout)
        except Exception as error:  # noqa: BLE001 - whatever the driver raises
            message = (
                f"The locks of alias {self.alias!r} cannot be acquired: the database {database!r} "
                f"does not say which store is active: {error}"
            )
            hint = f"Start the server, or correct DATABASES[{database!r}]."
            if isinstance(error, TablesMissing):
                hint = f"Run {migrate_command(database)}."
            return [Problem("E012", message, hint)]
        found = list(rights.problems(self.alias, self._active, self._own, reading))
        if reading.epochs_left < FEW_EPOCHS:
            message = (
                f"The active store of alias {self.alias!r} can be switched only "
                f"{reading.epochs_left} more times (epoch {reading.epoch} of {LAST_EPOCH}); then "
                "no store replaces one that fails."
            )
            hint = "Find out why it was switched so often, and give it a new KEY_PREFIX in time."
            found.append(Problem("W023", message, hint))
        return found

    def facts(self, *, deadline: float) -> Sequence[Fact]:
        reading = self._active.refresher.current(deadline).reading
        other = self._own.other_than(reading.active)
        text = f"{reading.active!r} is active (epoch {reading.epoch}), {other!r} is the standby"
        # What to do when few epochs are left is reported by ``store_problems``.
        return [Fact("fail-over", text)]

    @property
    def store_epoch(self) -> int | None:
        view = self._active.refresher.last
        return None if view is None else view.epoch

    def notices(self) -> Sequence[str]:
        view = self._active.refresher.last
        if view is None:
            return ()
        reading, found = view.reading, list[str]()
        away = reading.active != self._own.primary
        if reading.epoch > 1 and (away or reading.elapsed < SHOWN_FOR):
            by = f" by {reading.switched_by}" if reading.switched_by else ""
            found.append(
                f"{reading.active!r} is the active store of alias {self.alias!r} since switch "
                f"{reading.epoch - 1}, made{by}: {reading.reason}"
            )
        if reading.epochs_left < FEW_EPOCHS:
            text = f"Alias {self.alias!r} can be switched only {reading.epochs_left} more times"
            found.append(text)
        return found

    # -- the active store --------------------------------------------------------------

    def read_record(self) -> Reading:
        """The record, read now on a connection of its own.

        Raises:
            django.db.Error, TimeoutError: The database does not answer.
            SwitchRefused: Other processes changed the record again and again.
        """
        return self._active.read_record()

    def standby_of(self, seen: Reading) -> str:
        """The alias of the store that is not active."""
        return self._own.other_than(seen.active)

    def try_store(self, alias: str, seen: Reading) -> None:
        """Acquire, renew and release a lease in a store, as after a switch to it.

        Raises:
            ValueError: It is not one of the two stores.
            BackendUnavailable: After the switch, no lock could be acquired.
        """
        self._active.try_store(alias, seen)

    def switch(self, to: str, seen: Reading, *, reason: str = "by hand", by: str = "") -> None:
        """Make a store active, whatever its health.

        Args:
            to: The alias of the store.
            seen: What the decision rests on, from ``read_record``.
            by: Who switches.

        Raises:
            ValueError: It is not one of the two stores.
            SwitchRefused: The record has changed since it was read.
            django.db.Error, TimeoutError: No answer: the switch may have happened or not.
        """
        self._active.switch(to, seen, reason=reason, by=by)


def _info(term: Term, info: LeaseInfo) -> LeaseInfo:
    return dataclasses.replace(info, token=term.token(info.token))
