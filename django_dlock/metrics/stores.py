"""Asks the stores of all aliases, and counts records, when metrics are read.

The answers are the same in all processes. They are kept for a while, so that however often metrics
are read, a store is asked only now and then.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args
from urllib.parse import quote

from django.db import router
from django.db.models import Count

from .. import clock
from ..backends.failover.own_connection import OwnConnection
from ..exceptions import InvalidLockBackend
from ..handler import locks
from ..lease import HolderState
from ..log import logger
from ..operators.audit import is_defined, not_while_forking
from . import instruments
from .parts import Part, Round, Sample

STORES_EVERY, RECORDS_EVERY = 10.0, 60.0
"""Seconds for which an answer is kept."""
RECORDS_WITHIN = 30.0
"""Seconds that counting the records may take. A scrape does not wait so long, but a later one has
the answer."""
MOST_LISTED = 10_000
"""Leases; with more, they are only counted."""
PROBE = "django_dlock:probe"
"""A name that is asked for and never acquired."""
RECORDS = "records"


class StoreFacts:
    """The facts about all stores.

    Args:
        records: Whether idempotency records are counted, too.
        directory: Keeps the answers for all processes of a site; without it, each process asks.
    """

    def __init__(self, records: bool = True, directory: Path | None = None) -> None:
        self._records, self._directory = records, directory
        self._begin()

    def _begin(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._parts: dict[str, Part] = {}

    def samples(self) -> list[Sample]:
        """All values; never raises because of a store or a database, and never waits for long."""
        if self._pid != os.getpid():
            # A forked child: a thread of the parent may have been inside at that moment.
            self._begin()
        with self._lock:
            rounds = [self._part(alias).begin() for alias in _aliases()]
            if self._records:
                rounds.append(self._part().begin())
        return [sample for each in rounds for sample in _values(each)]

    def _part(self, alias: str | None = None) -> Part:
        """The part of an alias, or that of the records."""
        key = RECORDS if alias is None else f"store-{quote(alias, safe='')}"
        if (part := self._parts.get(key)) is None:
            file = self._directory and self._directory / f"django_dlock-{key}.json"
            labels = {"part": "store" if alias else RECORDS, "alias": alias or ""}
            if alias is None:
                part = Part(labels, RECORDS_EVERY, _count_records, file)
            else:
                part = Part(labels, STORES_EVERY, partial(_ask, alias), file)
            self._parts[key] = part
        return part


def _values(of: Round) -> Iterator[Sample]:
    of.wait()
    # First, because more may be found meanwhile.
    complete, found, part = of.complete, list(of.found), of.part
    yield from found
    if part.alias and not any(sample.instrument is instruments.STORE_UP for sample in found):
        yield Sample(instruments.STORE_UP, 0, {"alias": part.alias})
    yield Sample(instruments.LEFT_OUT, int(not complete), part.labels)


def _aliases() -> list[str]:
    try:
        return list(locks)
    except InvalidLockBackend as error:
        logger.warning("Metrics of the stores cannot be read: %s", error)
        return []


def _ask(alias: str) -> Iterator[Sample]:
    """What a store says; what it says first is known even if it says no more.

    Raises:
        BackendUnavailable: It does not answer.
        InvalidLockBackend: There is none.
    """
    labels = {"alias": alias}
    backend, began = locks[alias], clock.now()
    backend.locked(PROBE, deadline=backend.call_deadline())
    yield Sample(instruments.STORE_LATENCY, clock.now() - began, labels)
    yield Sample(instruments.STORE_UP, 1, labels)
    if (epoch := backend.store_epoch) is not None:
        yield Sample(instruments.STORE_EPOCH, epoch, labels)
    if "listing" not in backend.capabilities:
        return
    total = backend.count()
    yield Sample(instruments.STORE_LEASES, total, labels)
    if total > MOST_LISTED:
        return
    infos = backend.list()
    if not any("waiting" in info.unknown for info in infos):
        yield Sample(instruments.STORE_WAITING, sum(info.waiting for info in infos), labels)
    states = Counter(info.holder_state for info in infos if info.kind == "held")
    for state in get_args(HolderState):
        yield Sample(instruments.STORE_HOLDERS, states[state], {**labels, "state": state})


def _count_records() -> Iterable[Sample]:
    """How many there are.

    Raises:
        django.db.Error: The database does not answer.
    """
    from ..models import IdempotencyRecord

    database = router.db_for_read(IdempotencyRecord)
    if not is_defined(database):
        return []
    # On a connection that is cut if the database says nothing; it is closed at once, because the
    # next scrape may come much later.
    own = OwnConnection(lambda: database)
    with not_while_forking(database):
        try:
            with own.until(clock.now() + RECORDS_WITHIN):
                # Named, because a router may choose another database each time that it is asked.
                rows = IdempotencyRecord.objects.using(database).values_list("state")
                found = dict(rows.annotate(Count("id")).order_by())
        finally:
            own.close()
    states = IdempotencyRecord.State.values
    return [Sample(instruments.RECORDS, found.get(one, 0), {"state": one}) for one in states]
