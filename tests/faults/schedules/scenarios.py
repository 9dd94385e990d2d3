"""Schedules that are fixed instead of drawn: each once led to what the checker forbids."""

from __future__ import annotations

from dataclasses import dataclass, field

from .bed import Bed
from .beds_others import EtcdBed, FailoverBed, RestrictedFailoverBed
from .beds_redis import RedisBed, SentinelBed
from .draws import Draw
from .drive import Crew

SENTINEL_LOOKS = 2.5
"""Seconds after a fail-over within which a Sentinel names the new primary."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fixed schedule.

    Attributes:
        was: What happened before it was mended.
        seconds: Its length, before everything may recover.
    """

    name: str
    was: str
    bed: type[Bed]
    draws: tuple[Draw, ...]
    seconds: float
    crew: Crew = field(default_factory=Crew)


def _client(number: int, pause: float) -> Draw:
    """Replace the first or the second client by a new process."""
    return Draw(pause, "client killed", number / 2, 0.0)


SCENARIOS = (
    Scenario(
        "etcd stalls for a command_timeout",
        "a retried acquire revoked the lease under its own key, and two held",
        EtcdBed,
        # Two overlaps in 70 such stalls.
        tuple(
            Draw(0.3 + number % 6 / 10, "all paused", 0.0, 0.8 + number % 4 / 10)
            for number in range(60)
        ),
        100.0,
        Crew(threads=4, coroutines=4, names=6, long=0.0),
    ),
    Scenario(
        "a planned fail-over by Sentinel",
        "a holder went on renewing at the old primary for ten seconds",
        SentinelBed,
        (
            Draw(3.0, "planned fail-over", 0.0, 0.0),
            _client(0, SENTINEL_LOOKS),
            Draw(20.0, "planned fail-over", 0.0, 0.0),
            _client(1, SENTINEL_LOOKS),
        ),
        40.0,
        Crew(names=3, long=1.0, longest=6.0),
    ),
    Scenario(
        "a primary that only its holder reaches",
        "the holder went on renewing there, and was never told",
        SentinelBed,
        (Draw(4.0, "first primary cut off from all but a client", 0.0, 15.0),),
        25.0,
        Crew(names=3, long=1.0, longest=6.0),
    ),
    Scenario(
        "a router forgets all idle connections",
        "they were tried one by one, and the held lease was lost",
        RedisBed,
        tuple(Draw(7.0, "connections forgotten", 0.0, 0.0) for _ in range(4)),
        32.0,
        Crew(clients=1, coroutines=0, warm=24, long=1.0, longest=6.0),
    ),
    Scenario(
        "a switch with a restricted user",
        "the user had no rights for the keys of the second epoch, and nothing was granted",
        RestrictedFailoverBed,
        (Draw(3.0, "switched by hand", 0.9, 0.0),),
        5.0,
    ),
    Scenario(
        "the active store answers and refuses writes",
        "it counted as working, and nothing was granted",
        FailoverBed,
        (Draw(3.0, "active store refuses writes", 0.0, 0.0),),
        5.0,
    ),
)
