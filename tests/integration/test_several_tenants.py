"""The page on several tenants, with its code: django-tenants, PostgreSQL's schemas, a worker."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testproject.servers import RedisServer
from tests.conftest import missing
from tests.support import postgres
from tests.support.workers import PATIENCE, eventually

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "several-tenants.md"
SITE = ROOT / "tests" / "support" / "tenants_site"

ARRANGEMENTS = {
    "shared": "# settings.py: one table for all tenants",
    "own": "# settings.py: a table for each tenant",
}


def samples() -> dict[str, str]:
    """The page's modules, by the comment in their first line."""
    found = re.findall(r"^```py\n(#[^\n]*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return dict(found)


class Project:
    """The project in a directory of its own, with a worker, and a process that takes steps."""

    def __init__(self, directory: Path, redis: RedisServer, database: str) -> None:
        self.directory, self.log = directory, directory / "worker.log"
        self.env = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "site_settings",
            "PYTHONPATH": f"{directory}:{ROOT}",
            "TENANTS_POSTGRES": database,
            "TENANTS_REDIS": redis.url,
            "CELERY_SKIP_CHECKS": "1",
        }
        self.process = self.start(sys.executable, "steps.py", stdin=subprocess.PIPE)
        self.worker: subprocess.Popen[bytes] | None = None

    def start(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdout": subprocess.PIPE, **options}
        return subprocess.Popen(
            command, cwd=self.directory, env=self.env, start_new_session=True, **options
        )

    def __getattr__(self, step: str) -> Any:
        def take(*args: Any) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps([step, *args]).encode() + b"\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            assert answer, f"step {step} failed"
            return json.loads(answer)

        return take

    def manage(self, *command: str) -> None:
        """Run a command of ``manage.py``."""
        command = (sys.executable, "-m", "django", *command)
        subprocess.run(command, cwd=self.directory, env=self.env, check=True, timeout=PATIENCE)

    def work(self) -> None:
        """Start the worker."""
        log = self.log.open("wb")
        command = (sys.executable, "-m", "celery", "-A", "shop.celery", "worker", "-c", "2")
        self.worker = self.start(*command, "-l", "INFO", stdout=log, stderr=subprocess.STDOUT)
        log.close()
        eventually(lambda: b" ready." in self.log.read_bytes(), patience=2 * PATIENCE)

    def stop(self) -> None:
        for process in (self.worker, self.process):
            if process is not None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()


@contextmanager
def made(directory: Path, arrangement: str) -> Iterator[Project]:
    shutil.copytree(SITE, directory)
    found = samples()
    for head, code in found.items():
        if head.startswith("# shop/"):
            (directory / head.removeprefix("# ")).write_text(code)
    settings = [found["# settings.py"], found[ARRANGEMENTS[arrangement]]]
    (directory / "page_settings.py").write_text("\n".join(settings))
    make = [sys.executable, "-m", "django", "makemigrations", "customers", "shop", "--verbosity=0"]
    with RedisServer() as redis, postgres.database() as database:
        project = Project(directory, redis, database)
        try:
            subprocess.run(make, cwd=directory, env=project.env, check=True)
            project.setup()
            project.work()
            yield project
        finally:
            project.stop()


@pytest.fixture(scope="module", params=list(ARRANGEMENTS))
def project(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    pytest.importorskip("django_tenants")
    pytest.importorskip("tenant_schemas_celery")
    try:
        with made(tmp_path_factory.mktemp("tenants") / "site", request.param) as project:
            project.schema_of = (lambda who: "public") if request.param == "shared" else str
            yield project
    except postgres.PostgresNotFound as error:
        missing(str(error))


def test_g12_each_tenant_gets_the_answer_of_its_own_payment(project: Project) -> None:
    assert project.pay("a", "k1") == [200, '{"payments": 1}', False]
    assert project.pay("a", "k2") == [200, '{"payments": 2}', False]
    assert project.pay("b", "k1") == [200, '{"payments": 1}', False]
    assert project.pay("a", "k1") == [200, '{"payments": 1}', True]
    assert project.pay("b", "k1") == [200, '{"payments": 1}', True]


def test_g12_each_tenant_is_charged_once(project: Project) -> None:
    for tenant in ("a", "b", "a", "b"):
        project.result(project.publish(tenant, 10))
    assert [project.payments(tenant, 10) for tenant in ("a", "b")] == [1, 1]
    for tenant in ("a", "b"):
        assert f"[{tenant}]shop.tasks.charge 10" in project.records(project.schema_of(tenant))


def test_g1_a_tenant_waits_for_its_own_locks_only(project: Project) -> None:
    project.hold("a", "order:11")
    try:
        waits = project.publish("a", 11)
        project.result(project.publish("b", 11))
        assert project.payments("b", 11) == 1
        assert project.held() == ["[a]order:11"]
        assert "[a]order:11" in project.listed("--name", "[a]*")
        assert "No held lock" in project.listed("--name", "[b]*")
    finally:
        project.let_go("a")
    project.result(waits)
    assert project.payments("a", 11) == 1


def test_an_operator_clears_a_lock_by_its_full_name(project: Project) -> None:
    project.hold("a", "order:12")
    project.hold("b", "order:12")
    assert "1 cleared" in project.clear("[a]order:12")
    assert project.held() == ["[b]order:12"]
    project.let_go("b")
    # Its holder's background thread, which has no tenant, writes into the shared schema.
    eventually(lambda: "lost [a]order:12" in project.events("public"))


def test_leases_in_the_database_are_in_the_shared_schema(project: Project) -> None:
    for tenant in ("a", "b"):
        project.hold(tenant, "order:14", "database")
    assert sorted(project.leases("public")) == ["[a]order:14", "[b]order:14"]
    for tenant in ("a", "b"):
        project.let_go(tenant)


def test_what_is_published_again_later_runs_in_the_schema_of_its_tenant(project: Project) -> None:
    project.result(project.publish("a", 13))
    schema = project.schema_of("a")
    task_id = project.run_again(schema, "[a]shop.tasks.charge", "13")
    project.manage("all_tenants_command", "publish_pending_followups", "--older-than=0")
    project.result(task_id)
    assert [project.payments(tenant, 13) for tenant in ("a", "b")] == [2, 0]
    assert project.records(schema).count("[a]shop.tasks.charge 13") == 1


def test_a_persons_traces_are_erased_for_one_tenant(project: Project) -> None:
    for tenant in ("a", "b"):
        project.result(project.publish(tenant, 15))
    project.manage("tenant_command", "purge_idempotency_records", "--schema=a", "--key=15")
    assert "[a]shop.tasks.charge 15" not in project.records(project.schema_of("a"))
    assert "[b]shop.tasks.charge 15" in project.records(project.schema_of("b"))
