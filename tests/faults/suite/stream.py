"""A run without a fixed end: new keys are published as earlier ones finish."""

from __future__ import annotations

from .draws import order
from .kinds import GUARDED
from .run import Run
from .stage import Stage

AHEAD = 3
"""Unfinished messages for each slot of the workers."""

PATIENCE = 120.0
"""Seconds until everything must have finished."""


class Stream(Run):
    """A ``Run`` of guarded tasks alone, with short leases."""

    def __init__(self, stage: Stage, seed: str) -> None:
        super().__init__(
            stage,
            "soak",
            keys=0,
            busy=0,
            kinds=(GUARDED,),
            task="guarded",
            publish_again=True,
            patience=PATIENCE,
        )
        self.seed = seed

    @property
    def under_way(self) -> int:
        """How many messages have not finished."""
        return len(self._open)

    def go_on(self) -> None:
        """Note the finished messages, and publish as many new ones."""
        self._collect()
        while self.under_way < AHEAD * self.stage.pool.all_slots:
            key = self.new_key()
            how = order(self.seed, self.stage.pool.name, key)
            plan = {**how.plan, "journal": str(self.journal.path)}
            for _ in range(how.copies):
                self.publish(GUARDED, key, plan, **how.options)

    def new_key(self) -> int:
        key = next(self.stage.keys)
        self.keys.append(key)
        return key

    def publish_copy(self, delivery: str) -> str:
        """Publish another message with the key of this one; return its id."""
        kind, key, plan, options = self._sent[delivery]
        return self.publish(kind, key, plan, **options)
