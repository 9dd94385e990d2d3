"""Which store is active: reads the record, makes the stores of the epochs, switches."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ... import clock
from ...databases.errors import explaining
from ...exceptions import BackendRefused, BackendUnavailable
from ...log import logger
from ..base import AliasOptions, BaseLockBackend, StoreSwitch
from .config import FailoverOptions
from .health import Health, in_a_row_after
from .own_connection import on_own_connection
from .record import LAST_EPOCH, NoEpochLeft, Reading, Record, SwitchRefused
from .refresher import ViewRefresher
from .rules import View, view_of
from .terms import Leases, Term, store_for
from .trial import UNDECIDED, BeingTried, refusal_of, try_patiently

SWITCH_PATIENCE = 5
"""A switch, or reading the record for one, may take this many times the command timeout."""
FEW_EPOCHS = LAST_EPOCH // 10
"""With fewer epochs left, every switch says so, and checks warn."""


class ActiveStore:
    """The active store of one alias.

    Args:
        other: Returns the backend of another alias.
        prepare: Is called with each store that is made for an epoch.
        switched: Is called when this process begins to use another store; never blocks.
        tell: Is called with each switch of which this process learns; never blocks.

    Attributes:
        leases: Which epoch each lease of this process belongs to.
        other: As of ``BaseLockBackend``.
    """

    def __init__(
        self,
        options: AliasOptions,
        own: FailoverOptions,
        other: Callable[[str], BaseLockBackend],
        prepare: Callable[[BaseLockBackend], object],
        switched: Callable[[], object],
        *,
        tell: Callable[[StoreSwitch], object],
    ) -> None:
        self._alias, self._own, self._timeout = options.alias, own, options.command_timeout
        self.other, self._prepare, self._switched, self._tell = other, prepare, switched, tell
        longest = own.view_ttl + own.max_ttl
        self.record = Record(options.alias, options.key_prefix, own.database, own.primary, longest)
        self.leases = Leases(self._make)
        self._health = Health(own)
        self._idle_store: tuple[str, int, BaseLockBackend] | None = None
        # What this process knows of, so that it tells of each later switch once.
        self._told: Reading | None = None
        self._telling = threading.Lock()
        self.refresher = ViewRefresher(
            options.alias,
            self._read,
            self._watch_health,
            own.view_ttl / 3,
            lambda: self.record.database,
            # Both stores, and once more before a switch.
            after_asks=3 * self._timeout,
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
        store = store_for(self.other(alias), self._alias, epoch)
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
            self._switched()
        return term

    # -- for operators -----------------------------------------------------------------

    def read_record(self, patience: float | None = None) -> Reading:
        """The record, read now."""
        readings: list[Reading] = []
        self._in_database(lambda: readings.append(self.record.read()), patience)
        return readings[0]

    def switch(self, to: str, seen: Reading, *, reason: str, by: str) -> None:
        """Make a store active."""
        self._check_store(to)

        def call() -> None:
            self._note(seen)
            self.record.switch(seen, to, reason=reason, by=by)
            self._note(self.record.read(seen))

        self._in_database(call)
        self.refresher.refresh()

    def try_store(self, alias: str, seen: Reading) -> None:
        """Acquire and release a lease as after a switch to this store.

        Raises:
            BackendUnavailable: It does not grant.
        """
        self._check_store(alias)
        store = self.later_store(alias, seen.epoch + 1)
        try:
            try_patiently(store)
        finally:
            store.close()

    def later_store(self, alias: str, epoch: int) -> BaseLockBackend:
        """A store as it is in an epoch that has not begun; it has no leases, so it reports none."""
        store = store_for(self.other(alias), self._alias, epoch)
        store.other = self.other
        return store

    def _check_store(self, alias: str) -> None:
        known = (self._own.primary, self._own.standby)
        if alias not in known:
            text = f"{alias!r} is no store of alias {self._alias!r}; it has {list(known)}"
            raise ValueError(text)

    def _in_database(self, call: Callable[[], object], patience: float | None = None) -> None:
        patience = SWITCH_PATIENCE * self._timeout if patience is None else patience
        with explaining(self.record.database):
            on_own_connection(call, self.record.database, patience)

    def _note(self, reading: Reading) -> None:
        """Tell of a switch, unless it was made before this process read the record at all."""
        with self._telling:
            before = self._told
            if before is not None and before.epoch >= reading.epoch:
                return
            self._told = reading
        if before is None:
            return
        left = reading.epochs_left
        logger.warning(
            "Alias %r: the active store is now %r (epoch %d: %s); leases of the previous epoch "
            "are no longer renewed%s",
            self._alias,
            reading.active,
            reading.epoch,
            reading.reason,
            f"; only {left} more switches are possible" if left < FEW_EPOCHS else "",
            alias=self._alias,
            reason=reading.reason,
        )
        self._tell(
            StoreSwitch(
                self._alias,
                reading.active,
                before.active,
                reading.epoch,
                reading.reason,
                reading.switched_by,
            )
        )

    # -- on the refresher's thread ----------------------------------------------------------

    def _read(self) -> View:
        last, own = self.refresher.last, self._own
        asked_at = clock.now()
        reading = self.record.read(None if last is None else last.reading)
        view = view_of(reading, asked_at, clock.now(), own.view_ttl, own.max_ttl)
        self._term(view)
        self._note(reading)
        return view

    def _watch_health(self, view: View) -> None:
        """Find out whether the stores grant, and switch if it is time."""
        self.leases.close_old()
        health, reading, term = self._health, view.reading, self._term(view)
        health.begin(reading)
        if health.must_try(reading):
            granted = term.granted_at > clock.now() - self._own.view_ttl / 3
            refusal = None if granted else self._refusal_of(term.store)
            if refusal is None:
                health.active_granted()
                self.record.note_answer(reading)
            elif self._tells(refusal) and health.active_failed(reading):
                refused = isinstance(refusal, BackendRefused)
                why = f"refused: {refusal.message}" if refused else "did not answer"
                self._switch_by_itself(term, reading, f"the active store {why}")
                return
        if term.active != self._own.primary and health.must_look_back():
            refusal = self._refusal_of(self._idle(term))
            if not isinstance(refusal, UNDECIDED) and health.primary_tried(refusal is None):
                self._switch_by_itself(term, reading, "the primary answers again")

    def _tells(self, refusal: BackendUnavailable) -> bool:
        """Whether this means that the active store fails."""
        # What a failed try has left behind would hide that the next one fails, too.
        left_behind = isinstance(refusal, BeingTried) and self._health.is_failing
        return left_behind or not isinstance(refusal, UNDECIDED)

    def _switch_by_itself(self, term: Term, reading: Reading, reason: str) -> None:
        to, health = self._own.other_than(reading.active), self._health
        if not health.may_switch(reading):
            if health.tells():
                logger.warning(
                    "Alias %r: not switched to %r yet, after %d switches in a row: %s",
                    self._alias,
                    to,
                    reading.in_a_row,
                    reason,
                    alias=self._alias,
                )
            return
        if (refusal := self._refusal_of(self._idle(term))) is not None:
            if not isinstance(refusal, UNDECIDED) and health.tells():
                logger.error(
                    "Alias %r: not switched although %s, because %r grants nothing either: %s",
                    self._alias,
                    reason,
                    to,
                    refusal,
                    alias=self._alias,
                )
            return
        try:
            self.record.switch(reading, to, reason=reason, by="", in_a_row=in_a_row_after(reading))
        except NoEpochLeft as error:
            if health.tells():
                logger.error(
                    "Alias %r: not switched to %r although %s: %s",
                    self._alias,
                    to,
                    reason,
                    error,
                    alias=self._alias,
                )
        except SwitchRefused as error:
            logger.info(
                "Alias %r: not switched to %r: %s", self._alias, to, error, alias=self._alias
            )
        self.refresher.refresh()

    def _idle(self, term: Term) -> BaseLockBackend:
        """The store that is not active, as it will be in the next epoch."""
        alias, epoch = self._own.other_than(term.active), term.epoch + 1
        if self._idle_store is None or self._idle_store[:2] != (alias, epoch):
            self._close_idle_store()
            self._idle_store = alias, epoch, self.later_store(alias, epoch)
        return self._idle_store[2]

    def _refusal_of(self, store: BaseLockBackend) -> BackendUnavailable | None:
        return refusal_of(store, clock.now() + self._timeout)

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        for term in self.leases.terms():
            term.store.after_fork()
        if self._idle_store is not None:
            self._idle_store[2].after_fork()
        self._telling = threading.Lock()
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
            idle[2].close()
