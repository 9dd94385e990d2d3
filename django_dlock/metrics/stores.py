"""Asks the stores of all aliases, and counts records, when metrics are read.

The answers are the same in all processes. They are kept for a while, so that however often metrics
are read, a store is asked only now and then.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, get_args

from django.db import Error, connections, router
from django.db.models import Count

from .. import clock
from ..audit import is_defined
from ..exceptions import BackendUnavailable, InvalidLockBackend
from ..handler import locks
from ..lease import HolderState
from ..log import logger
from . import instruments
from .instruments import Instrument

__all__ = ["Sample", "StoreFacts"]

STORES_EVERY, RECORDS_EVERY = 10.0, 60.0
"""Seconds for which an answer is kept."""
MOST_LISTED = 10_000
"""Leases; with more, they are only counted."""
PROBE = "django_dlock:probe"
"""A name that is asked for and never acquired."""


class Sample(NamedTuple):
    """One value."""

    instrument: Instrument
    value: float
    labels: dict[str, str]


class StoreFacts:
    """The facts about all stores.

    Args:
        records: Whether idempotency records are counted, too.
    """

    def __init__(self, records: bool = True) -> None:
        self._records = records
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._stores: list[Sample] = []
        self._counts: list[Sample] = []
        self._stores_until = self._counts_until = 0.0

    def samples(self) -> list[Sample]:
        """All values; never raises because of a store or a database."""
        if self._pid != os.getpid():
            # A forked child: a thread of the parent may have been inside at that moment.
            self._lock, self._pid = threading.RLock(), os.getpid()
        with self._lock:
            if clock.now() >= self._stores_until:
                self._stores = [sample for alias in _aliases() for sample in _ask(alias)]
                self._stores_until = clock.now() + STORES_EVERY
            if self._records and clock.now() >= self._counts_until:
                self._counts = _count_records()
                self._counts_until = clock.now() + RECORDS_EVERY
            return [*self._stores, *self._counts]


def _aliases() -> list[str]:
    try:
        return list(locks)
    except InvalidLockBackend as error:
        logger.warning("Metrics of the stores cannot be read: %s", error)
        return []


def _ask(alias: str) -> Iterator[Sample]:
    labels = {"alias": alias}
    try:
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
    except (BackendUnavailable, InvalidLockBackend) as error:
        logger.info("Alias %r gives no metrics: %s", alias, error, alias=alias)
        yield Sample(instruments.STORE_UP, 0, labels)


def _count_records() -> list[Sample]:
    from ..models import IdempotencyRecord

    database = router.db_for_read(IdempotencyRecord)
    if not is_defined(database):
        return []
    connection = connections[database]
    was_open = connection.connection is not None
    try:
        # Named, because a router may choose another database each time that it is asked.
        rows = IdempotencyRecord.objects.using(database).values_list("state")
        found = dict(rows.annotate(Count("id")).order_by())
    except Error as error:
        logger.info("Idempotency records are not counted: %s", error)
        return []
    finally:
        # The thread of an exporter may end, or may not read again for a long time.
        if not was_open:
            connection.close()
    states = IdempotencyRecord.State.values
    return [Sample(instruments.RECORDS, found.get(one, 0), {"state": one}) for one in states]
