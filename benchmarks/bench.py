"""What rows stand on: servers of our own and a configured Django, for all processes of a run."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from testproject.servers import RedisServer

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Bench"]


class Bench:
    """One run's surroundings; a context manager.

    Child processes find them by the environment: with ``DJANGO_SETTINGS_MODULE`` being
    ``benchmarks.settings`` and ``BENCH_REDIS_URL`` set, ``django.setup()`` is all they need.

    Attributes:
        quick: The rows should make do with a tenth.
        redis: Without persistence, for nobody else; empty at the start of every row.
        directory: For files; removed at the end.
    """

    def __init__(self, *, quick: bool = False, postgres: bool = True) -> None:
        self.quick = quick
        self._stack = ExitStack()
        self._wants_postgres = postgres
        self.postgres_url: str | None = None
        self.no_postgres = "not asked for"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self.redis = stack.enter_context(RedisServer())
            if self._wants_postgres:
                self._start_postgres(stack)
            self._stack = stack.pop_all()
        os.environ["BENCH_REDIS_URL"] = self.redis.url
        os.environ["BENCH_POSTGRES_URL"] = self.postgres_url or ""
        os.environ["BENCH_DIRECTORY"] = str(self.directory)
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        import django

        django.setup()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def size(self, full: int, least: int = 1) -> int:
        """How many of something: a tenth in a quick run."""
        return max(least, full // 10) if self.quick else full

    def _start_postgres(self, stack: ExitStack) -> None:
        from tests import postgres

        try:
            self.postgres_url = stack.enter_context(postgres.database())
        except postgres.PostgresNotFound as error:
            self.no_postgres = str(error)
