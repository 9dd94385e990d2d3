"""The row in the database that says which store is active, so that all processes agree.

Every change is one conditional statement that compares the epoch, so a change that was decided
from an older state does nothing. All times in the row are on the database's clock.

A switch takes two statements. The time of the switch is written by the second one, after the first
has been committed: a process that read the old epoch read it before that time. If the process that
switches stops in between, the next reader writes the time.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import router
from django.db.models import BigIntegerField, Func

from ... import clock

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ...models import FailoverRecord

SECOND = 1_000_000
"""Microseconds; times in the row are whole microseconds since 1970."""
LAST_EPOCH = 2047
"""So that epoch and token fit into 63 bits; see ``backend``."""
ROUNDS = 10
SET_BACK = 1.0
"""Seconds by which the database's clock must be behind to count as set back."""


class SwitchRefused(Exception):
    """Another process has switched, or changed the row, meanwhile."""


class NoEpochLeft(SwitchRefused):
    """No token has room for another epoch."""


class Micros(Func):
    """The database's clock, whatever its time zone."""

    output_field = BigIntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        return "(extract(epoch from clock_timestamp()) * 1000000)::bigint", []

    def as_mysql(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, list[Any]]:
        return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))", []

    def as_sqlite(self, compiler: Any, connection: Any, **_: Any) -> tuple[str, tuple[Any, ...]]:
        return "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)", ()


class Reading(NamedTuple):
    """The row, as it was read.

    Attributes:
        epoch: Rises by one with every switch.
        active: The alias of the active store.
        longest: Seconds by which a lease of this epoch may outlive a read, in any process.
        quiet: The same for leases of earlier epochs; nothing is granted for that long.
        elapsed: Seconds since the switch, at least.
        silent_for: Seconds since a process was last granted a lease by the active store.
        reason: Why the switch was made; empty in the first epoch.
        switched_by: Who made it; empty if a process did.
        in_a_row: How many switches processes have made of late by themselves, this one included.
        switched_at: When it was made, as it stands in the row.
        read_at: When the row was read, on ``clock.now()``.
    """

    epoch: int
    active: str
    longest: float
    quiet: float
    elapsed: float
    silent_for: float
    reason: str
    switched_by: str
    in_a_row: int = 0
    switched_at: int = 0
    read_at: float = -math.inf

    @property
    def epochs_left(self) -> int:
        return LAST_EPOCH - self.epoch

    def elapsed_at(self, now: float) -> float:
        """Seconds since the switch by the clock of this process, at least."""
        return self.elapsed + (now - self.read_at) * (1 - clock.DRIFT)


class Record:
    """The row of one alias.

    Args:
        database: Alias in ``DATABASES``; ``None`` for the one that the routers choose.
        first: The store that is active in the first epoch.
        longest: Seconds by which a lease of this process may outlive a read.
    """

    def __init__(
        self, alias: str, key_prefix: str, database: str | None, first: str, longest: float
    ) -> None:
        self._names, self._first = (alias, key_prefix), first
        self._database, self._longest = database, round(longest * SECOND)
        text = f"{len(alias)}:{alias}{key_prefix}"
        self._digest = hashlib.sha256(text.encode()).hexdigest()

    @property
    def database(self) -> str:
        """The alias in ``DATABASES``."""
        # Imported here: this module is imported before the apps are loaded.
        from ...models import FailoverRecord

        named: str = self._database or router.db_for_write(FailoverRecord)
        return named

    def read(self, known: Reading | None = None) -> Reading:
        """Read the row, and complete it where that is necessary.

        Args:
            known: What was read before. If the row was deleted, or restored from a backup, a new
                epoch begins, which is later than all that this process knows.

        Raises:
            django.db.Error: No answer, or no such table.
            SwitchRefused: Other processes changed the row again and again.
        """
        for _ in range(ROUNDS):
            # This process may stand still after the database has answered.
            asked_at = clock.now()
            row = self._row.annotate(now=Micros()).first()
            if row is None:
                self._insert(known)
            elif known is not None and _is_older(row, known):
                reason = "an older record was restored"
                quiet = self._quiet_after(known)
                self._change(row, known.epoch + 1, known.active, reason, quiet=quiet)
            elif row.switched_at is None:
                self._note_switch(row.epoch)
            elif row.longest < (longest := self._longest_of(row.epoch, known)):
                self._row.filter(epoch=row.epoch, longest=row.longest).update(longest=longest)
            elif row.quiet < (quiet := self._quiet_before(row.epoch, known)):
                self._row.filter(epoch=row.epoch, quiet=row.quiet).update(quiet=quiet)
            elif row.answered_at > row.now + SECOND * SET_BACK:
                # Else a store that fails now would count as answering until the clock is there.
                self._row.filter(epoch=row.epoch, answered_at=row.answered_at).update(
                    answered_at=Micros()
                )
            elif (since := _since_switch(row, known, asked_at)) is not None:
                # Written for processes that start later, and know nothing of the time before.
                self._row.filter(epoch=row.epoch, switched_at=row.switched_at).update(
                    switched_at=row.now - _micros(since)
                )
            else:
                return _reading(row)
        raise SwitchRefused("other processes kept changing the record")

    def switch(self, seen: Reading, to: str, *, reason: str, by: str, in_a_row: int = 0) -> None:
        """Make another store active.

        Args:
            seen: What the decision rests on.
            in_a_row: As of ``Reading``; 0 for a switch by hand.

        Raises:
            SwitchRefused: The row has changed since.
            NoEpochLeft: There can be no other epoch.
            django.db.Error: No answer: the switch may have happened or not.
        """
        row = self._row.annotate(now=Micros()).first()
        if row is None or row.epoch != seen.epoch:
            raise SwitchRefused(f"another process has ended epoch {seen.epoch}")
        if row.epoch >= LAST_EPOCH:
            raise NoEpochLeft(f"epoch {row.epoch} is the last one that a token has room for")
        if not self._change(row, row.epoch + 1, to, reason, by=by, in_a_row=in_a_row):
            raise SwitchRefused(f"another process has changed epoch {seen.epoch}")

    def note_answer(self, seen: Reading) -> None:
        """Note that the active store of this epoch has answered just now."""
        self._row.filter(epoch=seen.epoch).update(answered_at=Micros())

    @property
    def _row(self) -> QuerySet[FailoverRecord]:
        from ...models import FailoverRecord

        return FailoverRecord.objects.using(self.database).filter(pk=self._digest)

    def _insert(self, known: Reading | None) -> None:
        from ...models import FailoverRecord

        alias, key_prefix = self._names
        row = FailoverRecord(
            pk=self._digest,
            alias=alias,
            key_prefix=key_prefix,
            epoch=1 if known is None else known.epoch + 1,
            active=self._first if known is None else known.active,
            longest=self._longest,
            quiet=self._quiet_after(known),
            switched_at=None,
            answered_at=0,
            reason="" if known is None else "the record was deleted",
        )
        FailoverRecord.objects.using(self.database).bulk_create([row], ignore_conflicts=True)

    def _quiet_after(self, known: Reading | None) -> int:
        """How long leases that the row does not know of may live; none before the first row."""
        return 0 if known is None else max(self._longest, _micros(known.longest, known.quiet))

    def _longest_of(self, epoch: int, known: Reading | None) -> int:
        """How long the row must say that leases of the epoch may live, as far as is known here."""
        if known is None or known.epoch != epoch:
            return self._longest
        return max(self._longest, _micros(known.longest))

    def _quiet_before(self, epoch: int, known: Reading | None) -> int:
        """How long leases may live that this process knows of, and that began before the epoch.

        A process that did not know of them may have begun it, after the row was lost.
        """
        return 0 if known is None or epoch <= known.epoch else _micros(known.longest)

    def _change(
        self,
        row: Any,
        epoch: int,
        to: str,
        reason: str,
        *,
        by: str = "",
        quiet: int = 0,
        in_a_row: int = 0,
    ) -> bool:
        # If the last epoch never began, leases of the one before it may be alive, too.
        is_over = row.switched_at is not None and row.now - row.switched_at >= 2 * row.quiet
        changed = self._row.filter(epoch=row.epoch, longest=row.longest).update(
            epoch=epoch,
            active=to,
            quiet=max(row.longest, 0 if is_over else row.quiet, quiet),
            switched_at=None,
            answered_at=Micros(),
            reason=reason[:255],
            switched_by=by[:255],
            in_a_row=in_a_row,
        )
        if changed:
            self._note_switch(epoch)
        return bool(changed)

    def _note_switch(self, epoch: int) -> None:
        unnoted = self._row.filter(epoch=epoch, switched_at=None)
        unnoted.update(switched_at=Micros(), answered_at=Micros())


def _is_older(row: Any, known: Reading) -> bool:
    """Whether the row was restored, or deleted and written anew, from something older.

    Another process that knew less may have begun this epoch anew, with another store than the one
    that it has here.
    """
    anew = row.epoch == known.epoch and row.active != known.active
    return bool(row.epoch < known.epoch or anew)


def _since_switch(row: Any, known: Reading | None, asked_at: float) -> float | None:
    """Seconds since the switch, if the database's clock shows less because it was set back."""
    if known is None or (known.epoch, known.switched_at) != (row.epoch, row.switched_at):
        return None
    since = known.elapsed_at(asked_at)
    return since if since > (row.now - row.switched_at) / SECOND + SET_BACK else None


def _micros(*seconds: float) -> int:
    return round(max(seconds) * SECOND)


def _reading(row: Any) -> Reading:
    return Reading(
        row.epoch,
        row.active,
        row.longest / SECOND,
        row.quiet / SECOND,
        # If the clock was set back before this process read the row, it measures from now on.
        max(0.0, (row.now - row.switched_at) / SECOND),
        (row.now - row.answered_at) / SECOND,
        row.reason,
        row.switched_by,
        row.in_a_row,
        row.switched_at,
        clock.now(),
    )
