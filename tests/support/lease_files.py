"""What tests of leases in a SQLite file have in common; see ``backends/conftest.py``, too."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django_dlock.backends.database import DatabaseBackend
from django_dlock.backends.database.lease_file import LeaseFile
from django_dlock.lease import Contention, Lease, LeaseRequest, Renewal
from django_dlock.process import current

MakeBackend = Callable[..., DatabaseBackend]


def request(name: str = "name", **kwargs: Any) -> LeaseRequest:
    return LeaseRequest(name=name, owner=secrets.token_hex(16), ttl=30.0, **kwargs)


def ask(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease | Contention:
    return backend.acquire(attempt, deadline=backend.call_deadline())


def grant(backend: DatabaseBackend, attempt: LeaseRequest) -> Lease:
    answer = ask(backend, attempt)
    assert isinstance(answer, Lease), answer
    return answer


def release(backend: DatabaseBackend, lease: Lease) -> str:
    return backend.release(lease.name, lease.owner, min_hold=0.0, deadline=backend.call_deadline())


def renew(backend: DatabaseBackend, lease: Lease) -> list[str]:
    renewal = Renewal(lease.name, lease.owner, lease.ttl)
    process, deadline = current().id, backend.call_deadline()
    return [it.outcome for it in backend.renew([renewal], process=process, deadline=deadline)]


def integrity(project: Path) -> str:
    with contextlib.closing(sqlite3.connect(LeaseFile(project).path)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


class Child:
    """A forked process that does one thing after the other, as it is told to."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._told, tell = os.pipe()
        go, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                for step in steps:
                    os.read(go, 1)
                    os.write(tell, json.dumps(step()).encode() + b"\n")
                os.read(go, 1)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(tell)
        os.close(go)
        self._answers = os.fdopen(self._told)

    def step(self) -> Any:
        os.write(self._go, b".")
        return json.loads(self._answers.readline())

    def end(self) -> None:
        os.write(self._go, b".")
        os.close(self._go)
        self._answers.close()
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 0
