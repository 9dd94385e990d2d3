"""G7: no interruption of acquire or release leaves a lease that is renewed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from django_dlock import Lock
from testproject.servers import RedisServer
from tests.faults.conftest import LEASE, NewHolder
from tests.support.aliases import TTL, Dlocks, alias, configured
from tests.support.holder import Holder
from tests.support.interrupts import ERRORS, How, all_free, cancellations

ROUNDS = 300
SEED = 20240229
SLACK = 20.0
"""Seconds; a lease that were still renewed would not end by then either."""

PATIENT: dict[str, Any] = {"TTL": 3 * TTL, "OPTIONS": {"command_timeout": TTL}}
"""Seconds; long enough for many commands on a machine that stalls for tenths of a second."""


@pytest.fixture
def patient(own_redis: RedisServer) -> Iterator[Dlocks]:
    """``default`` with enough time for each command."""
    entries = {"default": alias(own_redis.url, **PATIENT)}
    with configured(entries):
        yield entries


@pytest.fixture
def patient_holder(new_holder: NewHolder, patient: Dlocks) -> Holder:
    """A process with enough time for its commands."""
    return new_holder(dlocks=patient)


@pytest.mark.parametrize("how", ["with", "try"])
@pytest.mark.parametrize("error", ERRORS)
def test_g7_an_interrupt_at_any_moment_leaves_nothing_renewed(
    error: str, how: How, patient_holder: Holder
) -> None:
    patient_holder.do("from tests.support.interrupts import storm")
    interrupted = patient_holder.do(f"storm({error!r}, {how!r}, rounds={ROUNDS}, seed={SEED})")
    assert interrupted > 4, "hardly anything was interrupted"
    # The process lives on, so a lease that it still renewed would keep the name taken.
    assert all_free(ROUNDS, PATIENT["TTL"] + SLACK)


def test_g7_interrupts_keep_no_other_thread_from_the_lock(patient_holder: Holder) -> None:
    holder = patient_holder
    holder.do(
        "from tests.support.interrupts import storm\n"
        "stop = threading.Event()\n"
        "turns = [0] * 3\n"
        "def churn(n):\n"
        "    while not stop.is_set():\n"
        "        with Lock('it', wait=None): turns[n] += 1\n"
        "threads = [threading.Thread(target=churn, args=[n]) for n in range(3)]\n"
        "for thread in threads: thread.start()"
    )
    interrupted = holder.do(
        f"storm('KeyboardInterrupt', 'with', rounds={ROUNDS}, seed={SEED}, name='it')"
    )
    assert interrupted > 4, "hardly anything was interrupted"
    holder.do("before = turns.copy()")
    holder.do("while any(now < then + 10 for now, then in zip(turns, before)): pass")
    holder.do("stop.set()\nfor thread in threads: thread.join()")


@pytest.mark.parametrize("how", ["with", "try"])
async def test_g7_a_cancellation_at_any_moment_leaves_nothing_renewed(
    how: How, patient: Dlocks
) -> None:
    interrupted = await cancellations(how, rounds=ROUNDS, seed=SEED)
    assert interrupted > 4, "hardly anything was cancelled"
    assert await asyncio.to_thread(all_free, ROUNDS, PATIENT["TTL"] + SLACK)


@pytest.mark.parametrize("how", ["with", "try"])
def test_g7_an_interrupt_anywhere_leaves_nothing_renewed(
    how: How, dlocks: Dlocks, holder: Holder
) -> None:
    holder.do("from tests.support.interrupts import one, walk")
    holder.do("one('warm', 'with')")
    interrupted: dict[str, str] = holder.do(f"walk({how!r})")
    assert len(interrupted) > 100
    # The process and all its handles stay alive.
    stay = {
        name: where
        for name, where in interrupted.items()
        if not Lock(name).acquire(timeout=LEASE + TTL)
    }
    assert stay == {}
    # The watchdog itself must still work.
    holder.do("lock = Lock('it'); lock.acquire()")
    assert not Lock("it").acquire(timeout=2 * TTL)
    assert holder.do("lock.held")
