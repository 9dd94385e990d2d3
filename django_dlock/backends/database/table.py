"""The leases of one alias in the table of its database: rows, read and changed by a deadline."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn, TypeVar

from ... import clock
from ...databases.errors import migrate_command
from ...exceptions import BackendRefused, BackendUnavailable
from .. import handover_mac
from ..base import AliasOptions
from ..shared.pool import NoSlot
from . import sqlite
from .config import DatabaseOptions
from .connection import Connection, Failure
from .pool import Urgency
from .rows import Message, Row
from .store import Store

T = TypeVar("T")
Change = Callable[[Row, int], tuple[T, list[Message]]]
"""Changes a row at the database's time; returns the answer and the messages for waiters."""


class LeaseTable:
    """Makes calls on the connections of a store, and says in errors what is wrong with it."""

    def __init__(self, options: AliasOptions, own: DatabaseOptions) -> None:
        self._options, self._own = options, own
        # Owners whose acquire or release was sent and not answered so far.
        self._unanswered: set[str] = set()
        self._made: Store | None = None
        # Reentrant: a signal handler may come here while its thread makes the store.
        self._making = threading.RLock()

    @property
    def alias(self) -> str:
        return self._options.alias

    @property
    def store(self) -> Store:
        store = self._made
        if store is None or not store.is_current:
            store = self._new_store()
        return store

    def _new_store(self) -> Store:
        with self._making:
            old = self._made
            if old is not None and old.is_current:
                # Another thread was first.
                return old
            self._made = made = Store(self._options, self._own)
        if old is not None:
            old.close()
        return made

    @property
    def is_in_use(self) -> bool:
        """Whether this process may have written heartbeats or leases to this database.

        After a test run, the settings name the project's own database again. It has no rows of
        this process.
        """
        return self._made is not None and self._made.is_current

    def forget(self) -> None:
        """Leave all connections to the parent; called in a forked child."""
        # Another thread of the parent may have held the lock during the fork.
        self._making = threading.RLock()
        self._unanswered = set()
        if self._made is not None:
            self._made.forget()

    def close_unused(self) -> None:
        if self._made is not None:
            self._made.pool.close_unused()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    # -- rows --------------------------------------------------------------------------

    def names(self, name: str) -> tuple[str, str]:
        """Key prefix and name."""
        return self._options.key_prefix, name

    def digest(self, name: str) -> bytes:
        """Identifies the row of a name."""
        # Names are compared exactly, whatever the database's rules for case and accents.
        prefix = self._options.key_prefix
        text = f"{len(prefix)}:{prefix}{name}"
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def mac_key(self, name: str) -> str:
        """The key for hand-overs of a name; see ``handover_mac``."""
        return handover_mac.key_of(self._options.key_prefix, name)

    def read(self, name: str, deadline: float) -> tuple[int, Row | None]:
        """The time, and the row if there is one."""
        return self.ask(lambda one, store, key: store.dialect.read(one, key), name, deadline)

    def change(
        self,
        name: str,
        change: Change[T],
        deadline: float,
        urgency: Urgency = "ordinary",
        *,
        owner: str = "",
        done: Callable[[Row, int], T | None] = lambda row, now: None,
        overtaken: Callable[[bool], T | None] = lambda in_doubt: None,
    ) -> T:
        """Read the row, change it and write it; repeat while other callers change it first.

        Args:
            owner: Whose acquire or release this is; see ``send``.
            done: The answer if the row shows that the change has been made; asked only after the
                reply to a write was lost.
            overtaken: The answer if others kept changing the row; is told whether it may have been
                written nevertheless, because the reply to a write was lost.
        """
        in_doubt, overtaken_at = False, float("-inf")

        def once(one: Connection, store: Store, key: Any, writes: bool = True) -> tuple[T, bool]:
            nonlocal in_doubt
            now, row, is_new = store.dialect.read_or_new(one, key)
            if in_doubt and not is_new and (known := done(row, now)) is not None:
                return known, True
            before = row.values()
            answer, unsigned = change(row, now)
            messages = [message.signed(self.mac_key(name)) for message in unsigned]
            if row.values() == before or not writes:
                return answer, row.values() == before
            try:
                if is_new:
                    write = partial(store.dialect.insert, one, key, self.names(name), row, messages)
                else:
                    write = partial(store.dialect.write, one, key, before, row, messages)
                written = self.send([owner] if owner else [], write)
            except Failure as error:
                in_doubt = in_doubt or error.kind == "broken"
                raise
            return answer, written

        def use(one: Connection, store: Store, key: Any) -> T:
            nonlocal overtaken_at
            try:
                return unless_overtaken(one, store, key)
            except Failure as error:
                if error.kind == "overtaken":
                    overtaken_at = clock.now()
                raise

        def unless_overtaken(one: Connection, store: Store, key: Any) -> T:
            if store.vendor == "sqlite":
                # If the row were read first and written later, it would often have changed while
                # this caller waited for the right to write, and a waiter would not get into the
                # queue. A poll, which changes nothing, does not ask for that right.
                answer, is_done = once(one, store, key, writes=False)
                if not is_done:
                    with sqlite.sole_writer(one):
                        answer, is_done = once(one, store, key)
            else:
                answer, is_done = once(one, store, key)
            if not is_done:
                others = RuntimeError("other callers kept changing the lock's row")
                raise Failure("overtaken", others)
            return answer

        try:
            return self.ask(use, name, deadline, urgency)
        except BackendUnavailable as error:
            # An outage that follows a conflict is reported as an outage. But if the time ran out in
            # the middle of an attempt, the server did answer a moment ago.
            is_overtaken = _kind(error) == "overtaken" or (
                _kind(error) in ("broken", "transient")
                and clock.now() >= deadline
                and clock.now() - overtaken_at < self._options.command_timeout / 4
            )
            answer = overtaken(in_doubt) if is_overtaken else None
            if answer is None:
                raise
            return answer

    # -- requests without an answer ----------------------------------------------------

    def send(self, owners: Collection[str], statement: Callable[[], T]) -> T:
        """Execute the statement of these owners' acquires or releases; note if it has no answer.

        It may then have been executed, or may be executed later, such as after a wait for the row.
        """
        first_sent = [owner for owner in owners if not self.is_repeated(owner)]
        self._unanswered.update(first_sent)
        try:
            answer = statement()
        except Failure as error:
            if error.kind != "broken":
                self.answered(*first_sent)
            raise
        self.answered(*first_sent)
        return answer

    def is_repeated(self, owner: str) -> bool:
        """Whether a request of this owner was sent before and not answered."""
        return owner in self._unanswered

    def answered(self, *owners: str) -> None:
        """Forget what ``send`` has noted."""
        self._unanswered.difference_update(owners)

    # -- calls -------------------------------------------------------------------------

    def ask(
        self,
        use: Callable[[Connection, Store, Any], T],
        name: str,
        deadline: float,
        urgency: Urgency = "ordinary",
    ) -> T:
        """As ``call``, with the key of a name."""
        digest = self.digest(name)

        def with_key(one: Connection, store: Store) -> T:
            return use(one, store, store.dialect.key(digest))

        return self.call(with_key, deadline, urgency, name)

    def call(
        self,
        use: Callable[[Connection, Store], T],
        deadline: float,
        urgency: Urgency = "ordinary",
        name: str = "",
    ) -> T:
        """Call ``use`` with a connection; see ``Pool.call``.

        Raises:
            BackendUnavailable: No answer by the deadline.
            BackendRefused: A repetition would not help.
        """
        store = self.store
        try:
            return store.pool.run(lambda one: use(one, store), deadline, urgency)
        except NoSlot as none:
            raise none.unavailable(name, self.alias) from none
        except Failure as error:
            self._unavailable(error, store, name)

    def _unavailable(self, error: Failure, store: Store, name: str) -> NoReturn:
        database, alias = f"DATABASES[{store.database!r}]", self._options.alias
        migrate = migrate_command(store.database)
        option = f"DLOCKS[{alias!r}]['OPTIONS']['database']"
        told = {
            "missing": f"{database} has no table for locks; run {migrate}",
            "read-only": f"{database} is read-only, as a standby is; name the primary in {option}",
            "denied": f"{database} refuses the user, its password or its rights",
            "refused": f"{database} refused the statement",
            "unreachable": f"No connection to {database}",
            "overtaken": f"{database} answered, but made no change",
        }.get(error.kind, f"{database} gave no answer")
        if error.obstacle:
            told = f"Locks cannot be kept in {database}: {error.obstacle}"
        refused = bool(error.obstacle) or error.kind in ("missing", "denied", "refused")
        kind = BackendRefused if refused else BackendUnavailable
        raised = kind(f"{told}: {error}", name, alias)
        if error.kind == "missing":
            raised.cure = f"Run {migrate}."
        raise raised from error


def _kind(error: BackendUnavailable) -> str:
    return error.__cause__.kind if isinstance(error.__cause__, Failure) else ""
