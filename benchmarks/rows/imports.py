"""What ``from django_dlock import …`` adds to the start of a process that has Django and Celery."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..model import OURS, Metric, Readings, Role, Row, Session, Subject, Unavailable

if TYPE_CHECKING:
    from ..bench import Bench

FLOOR = "import redis"

# The process of a site before it loads its views and tasks: set up, with a Celery app.
BEFORE = """
import time
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
import django
django.setup()
import django.http
from celery import Celery
Celery("bench").finalize()
"""

SUBJECTS: tuple[tuple[str, Role, str, str], ...] = (
    (FLOOR, "floor", FLOOR, "in an interpreter that has nothing"),
    (f"{FLOOR}, over Django and Celery", "floor", FLOOR, "much of what it needs is there"),
    (
        OURS,
        "ours",
        "from django_dlock import Lock, locked, locked_view",
        "over Django, Celery and redis-py",
    ),
    ("redis-py Lock", "peer", "from redis.lock import Lock", "over Django, Celery and redis-py"),
    ("celery-once", "peer", "from celery_once import QueueOnce", "over the same"),
    ("celery-singleton", "peer", "from celery_singleton import Singleton", "over the same"),
)


class _Import(Session):
    """Each time in a new interpreter whose bytecode is on disk; measures CPU time.

    Args:
        cache: Where the bytecode is kept, even if the environment forbids writing it.
    """

    def __init__(self, name: str, statement: str, cache: Path) -> None:
        self._env = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)
        before = BEFORE if statement == FLOOR else f"{BEFORE}import redis\n"
        if name == FLOOR:
            before = "import time\n"
        self._script = (
            f"{before}began = time.process_time()\n{statement}\nprint(time.process_time() - began)"
        )

    def round(self) -> Readings:
        answer = subprocess.run(
            [sys.executable, "-c", self._script],
            cwd=Path(__file__).parents[2],
            env=self._env,
            capture_output=True,
            text=True,
            check=True,
        )
        return {"import": float(answer.stdout)}


def rows(bench: Bench) -> Iterable[Row]:
    yield Row(
        "import",
        "Importing the package in a process that has Django, Celery and redis-py",
        (Metric("import", "s", floor=FLOOR),),
        tuple(_subject(bench, *facts) for facts in SUBJECTS),
        rounds=4,
        seconds=12,
    )


def _subject(bench: Bench, name: str, role: Role, statement: str, options: str) -> Subject:
    @contextmanager
    def ready() -> Iterator[Session]:
        module = statement.split()[1]
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise Unavailable(f"{module} is not installed")
        session = _Import(name, statement, bench.directory / "bytecode")
        # Compile what was not compiled yet.
        session.round()
        yield session

    return Subject(name, role, f"{statement}; {options}", ready)
