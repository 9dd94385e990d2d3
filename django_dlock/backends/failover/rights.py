"""Whether the users of both stores have rights on the keys of later epochs, for checks.

Each epoch has a key prefix of its own, so rights on the keys of the first one do not suffice. With
such a user, the first switch would be an outage. Nothing is written here but, in ZooKeeper, the
empty nodes below which these keys are.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...exceptions import BackendRefused, BackendUnavailable
from ..base import BaseLockBackend, Problem
from .active import ActiveStore
from .config import FailoverOptions
from .record import LAST_EPOCH, Reading
from .trial import PROBE


def problems(
    alias: str, active: ActiveStore, own: FailoverOptions, reading: Reading
) -> Iterator[Problem]:
    """W022, for each store that answers in its own alias."""
    for name in (own.primary, own.standby):
        if (refused := _refused_later(active, name, reading)) is None:
            continue
        prefix = active.other(name).options.key_prefix
        yield Problem(
            "W022",
            f"The user of DLOCKS[{name!r}] lacks rights on the keys that it needs after a switch "
            f"of alias {alias!r}, whose KEY_PREFIX begins with {f'{prefix}.'!r}: {refused}",
            f"Redis: ACL SETUSER <user> ~{{{prefix}.*:0}}:2:* &{{{prefix}.*:0}}:2:m:* "
            f"etcd: etcdctl role grant-permission <role> readwrite {prefix}. --prefix=true "
            "ZooKeeper: the right to create nodes beside the one of KEY_PREFIX",
        )


def _refused_later(active: ActiveStore, name: str, reading: Reading) -> str | None:
    """What the store refuses in the next epoch or the last one, and does not in the first."""
    try:
        known = {problem.id for problem in active.other(name).store_problems()}
        # The last one, because the rights must be a pattern.
        for epoch in (min(reading.epoch + 1, LAST_EPOCH), LAST_EPOCH):
            store = active.later_store(name, epoch)
            try:
                if (refused := _refused(store, known)) is not None:
                    return refused
            finally:
                store.close()
    except BackendUnavailable:
        # Reported for the alias of the store.
        pass
    return None


def _refused(store: BaseLockBackend, known: set[str]) -> str | None:
    try:
        store.locked(PROBE, deadline=store.call_deadline())
    except BackendRefused as error:
        return error.message
    found = (problem.message for problem in store.store_problems() if problem.id not in known)
    return next(found, None)
