"""Which store is active: reads the record, makes the stores of the epochs, watches their health."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ... import clock
from ...exceptions import BackendRefused, BackendUnavailable
from ...log import logger
from ..base import AliasOptions, BaseLockBackend
from .config import FailoverOptions
from .health import Health
from .record import Reading, Record, SwitchRefused
from .refresher import ViewRefresher, on_own_connection
from .rules import View, view_of
from .terms import Leases, Term, store_for

__all__ = ["PROBE", "ActiveStore"]

PROBE = "django_dlock:probe"
"""The name that is looked up to see whether a store answers; it is never acquired."""
SWITCH_PATIENCE = 5
"""A switch, or reading the record for one, may take this many times the command timeout."""


class ActiveStore:
    """The active store of one alias.

    Args:
        other: Returns the backend of another alias.
        prepare: Is called with each store that is made for an epoch.
        switched: Is called when this process learns of a switch; never blocks.

    Attributes:
        leases: Which epoch each lease of this process belongs to.
    """

    def __init__(
        self,
        options: AliasOptions,
        own: FailoverOptions,
        other: Callable[[str], BaseLockBackend],
        prepare: Callable[[BaseLockBackend], object],
        switched: Callable[[], object],
    ) -> None:
        self._alias, self._own, self._timeout = options.alias, own, options.command_timeout
        self._other, self._prepare, self._switched = other, prepare, switched
        longest = own.view_ttl + own.max_ttl
        self.record = Record(options.alias, options.key_prefix, own.database, own.primary, longest)
        self.leases = Leases(self._make)
        self._health = Health(own)
        self._idle_store: tuple[str, BaseLockBackend] | None = None
        self.refresher = ViewRefresher(
            options.alias,
            self._read,
            self._watch_health,
            own.view_ttl / 3,
            lambda: self.record.database,
        )

    def _make(self, alias: str, epoch: int) -> BaseLockBackend:
        if alias not in (self._own.primary, self._own.standby):
            raise BackendRefused(
                f"The record in the database {self.record.database!r} names the active store "
                f"{alias!r}, but DLOCKS[{self._alias!r}] has {self._own.primary!r} and "
                f"{self._own.standby!r}. Deploy the same settings everywhere",
                "",
                self._alias,
            )
        store = store_for(self._other(alias), self._alias, epoch)
        self._prepare(store)
        return store

    # -- for leases --------------------------------------------------------------------

    def open_term(self, name: str, deadline: float) -> tuple[View, Term]:
        """The active store, if all leases of the previous epoch are over.

        Raises:
            BackendUnavailable: They are not, or the record cannot be read.
        """
        view = self.refresher.current(deadline)
        left = view.opens_at - clock.now()
        if left > 0:
            raise BackendUnavailable(
                f"The active store was switched to {view.active!r}; leases granted "
                f"before may last another {left:.1f} s; until then nothing is granted",
                name,
                self._alias,
            )
        return view, self._term(view)

    def term_of(self, owner: str, deadline: float) -> Term:
        """The term in which this owner asked for its lease; the latest one if it is not known.

        Raises:
            BackendUnavailable: No term is known, and the record cannot be read.
        """
        return self.leases.of(owner) or self._term(self.refresher.current(deadline))

    def _term(self, view: View) -> Term:
        before = self.leases.latest
        term, began = self.leases.term(view)
        if began and before is not None:
            logger.warning(
                "Alias %r: the active store is now %r (epoch %d: %s); leases of the previous epoch "
                "are no longer renewed",
                self._alias,
                term.active,
                term.epoch,
                view.reading.reason,
                alias=self._alias,
                reason=view.reading.reason,
            )
            self._switched()
        return term

    # -- for operators -----------------------------------------------------------------

    def read_record(self) -> Reading:
        """The record, read now."""
        readings: list[Reading] = []
        self._in_database(lambda: readings.append(self.record.read()))
        return readings[0]

    def switch(self, to: str, seen: Reading, *, reason: str, by: str) -> None:
        """Make a store active."""
        known = (self._own.primary, self._own.standby)
        if to not in known:
            raise ValueError(f"{to!r} is no store of alias {self._alias!r}; it has {list(known)}")
        self._in_database(partial(self.record.switch, seen, to, reason=reason, by=by))
        self.refresher.refresh()

    def _in_database(self, call: Callable[[], object]) -> None:
        on_own_connection(call, self.record.database, SWITCH_PATIENCE * self._timeout)

    # -- on the refresher's thread ----------------------------------------------------------

    def _read(self) -> View:
        last, own = self.refresher.last, self._own
        asked_at = clock.now()
        reading = self.record.read(None if last is None else last.reading)
        view = view_of(reading, asked_at, clock.now(), own.view_ttl, own.max_ttl)
        self._term(view)
        return view

    def _watch_health(self, view: View) -> None:
        """Note whether the stores answer, and switch if it is time."""
        self.leases.close_old()
        health, reading, term = self._health, view.reading, self._term(view)
        health.begin(reading)
        since = clock.now() - self._own.view_ttl / 3
        if term.answered_at > since or self._answers(term.store):
            health.active_answered()
            if health.must_note(reading):
                self.record.note_answer(reading)
        elif health.active_failed(reading) and self._answers(self._other_store(term)):
            self._switch_by_itself(reading, "the active store did not answer")
            return
        if term.active != self._own.primary and health.may_fail_back:
            answered = self._answers(self._other_store(term))
            if health.primary_answered(answered):
                self._switch_by_itself(reading, "the primary answers again")

    def _switch_by_itself(self, reading: Reading, reason: str) -> None:
        to = self._own.other_than(reading.active)
        try:
            self.record.switch(reading, to, reason=reason, by="")
        except SwitchRefused as refusal:
            logger.info(
                "Alias %r: not switched to %r: %s", self._alias, to, refusal, alias=self._alias
            )
        self.refresher.refresh()

    def _other_store(self, term: Term) -> BaseLockBackend:
        alias = self._own.other_than(term.active)
        if self._idle_store is None or self._idle_store[0] != alias:
            self._close_idle_store()
            store = store_for(self._other(alias), self._alias, 1)
            # It has no leases, so it reports nothing.
            store.other = self._other
            self._idle_store = alias, store
        return self._idle_store[1]

    def _answers(self, store: BaseLockBackend) -> bool:
        try:
            store.locked(PROBE, deadline=clock.now() + self._timeout)
        except BackendUnavailable:
            return False
        return True

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        for term in self.leases.terms():
            term.store.after_fork()
        if self._idle_store is not None:
            self._idle_store[1].after_fork()
        self.leases.forget()
        self.refresher.forget()

    def close(self) -> None:
        self.refresher.close()
        for term in self.leases.terms():
            term.store.close()
        self._close_idle_store()

    def _close_idle_store(self) -> None:
        idle, self._idle_store = self._idle_store, None
        if idle is not None:
            idle[1].close()
