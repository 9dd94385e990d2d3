"""What ``manage.py check`` and a starting worker find in a project with Celery's own layout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.workers import PATIENCE, ROOT, eventually

pytestmark = pytest.mark.extended

FILES = {
    "manage.py": """
        import os, sys
        from django.core.management import execute_from_command_line
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "proj.settings")
        execute_from_command_line(sys.argv)
    """,
    "proj/__init__.py": """
        from .celery import app as celery_app
        __all__ = ("celery_app",)
    """,
    "proj/celery.py": """
        import os
        from celery import Celery
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "proj.settings")
        app = Celery("proj")
        app.config_from_object("django.conf:settings", namespace="CELERY")
        app.autodiscover_tasks()
    """,
    "proj/settings.py": """
        SECRET_KEY = "x"
        INSTALLED_APPS = ["django_dlock", "shop"]
        DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
        DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
        CELERY_BROKER_URL = "memory://"
        SILENCED_SYSTEM_CHECKS = ["django_dlock.W112"]
    """,
    "shop/__init__.py": "",
}

CHARGE = """
    from celery import shared_task
    from django_dlock import LockedTask

    @shared_task(base=LockedTask, {})
    def charge(order_id):
        return order_id
"""

FORGOTTEN = """
    from celery import shared_task

    @shared_task(lock_key="order:{order_id}", time_limit=60)
    def charge(order_id):
        return order_id
"""

SEES_THE_CHECKS = """
    from django.apps import AppConfig
    from django.core import checks

    def counted(**kwargs):
        print("checks run")
        return []

    class ShopConfig(AppConfig):
        name = "shop"

        def ready(self):
            checks.register(counted)
"""

TASKS_ASKED_FOR_BEFORE = """
    from celery import current_app
    from django.apps import AppConfig

    class ShopConfig(AppConfig):
        name = "shop"

        def ready(self):
            from . import tasks
            try:
                current_app.tasks
            except Exception:
                pass
"""


def write(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in {**FILES, **files}.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))


def environment() -> dict[str, str]:
    left_out = ("DJANGO_SETTINGS_MODULE", "CELERY_SKIP_CHECKS")
    known = {key: value for key, value in os.environ.items() if key not in left_out}
    return {**known, "PYTHONPATH": str(ROOT)}


def checked(directory: Path, tasks: str, **files: str) -> str:
    """The output of ``manage.py check`` for these tasks."""
    write(directory, {"shop/tasks.py": tasks, **files})
    done = subprocess.run(
        [sys.executable, "manage.py", "check"],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("time_limit=7200, lock_max_hold=60", "django_dlock.W107"),
        ("lock_key='order:{order}'", "django_dlock.E101"),
        ("ttl=30", "use lock_ttl"),
        ("lock_ttl=1", "raise lock_ttl"),
        ("using='other'", "django_dlock.W121"),
        ("timeout=5", "use lock_wait"),
    ],
)
def test_check_imports_the_tasks_itself(tmp_path, options, told):
    assert told in checked(tmp_path, CHARGE.format(options))


def test_celery_runs_the_checks_again_when_it_imports_the_tasks(tmp_path):
    said = checked(tmp_path, CHARGE.format("using=5"), **{"shop/apps.py": SEES_THE_CHECKS})
    assert "django_dlock.W121" in said
    assert said.count("checks run") == 2


def test_check_finds_wrong_options_that_an_earlier_import_has_hidden(tmp_path):
    wrong = CHARGE.format("lock_key='order:{order}'")
    said = checked(tmp_path, wrong, **{"shop/apps.py": TASKS_ASKED_FOR_BEFORE})
    assert "django_dlock.E101" in said
    assert "Traceback" not in said


def test_check_finds_a_time_limit_beyond_the_visibility_timeout_of_redis(tmp_path):
    settings = dedent(FILES["proj/settings.py"]).replace("memory://", "redis://127.0.0.1:1/0")
    said = checked(tmp_path, CHARGE.format("time_limit=7200"), **{"proj/settings.py": settings})
    assert "django_dlock.W103" in said


def test_check_names_options_of_locked_tasks_on_other_tasks(tmp_path):
    said = checked(tmp_path, FORGOTTEN)
    assert "django_dlock.W120" in said
    assert "'shop.tasks.charge' has lock_key, but is not a LockedTask" in said


def test_check_is_silent_about_correct_tasks(tmp_path):
    said = checked(tmp_path, CHARGE.format("lock_key='order:{order_id}', time_limit=60"))
    assert "no issues" in said


def test_check_works_in_a_project_without_celery(tmp_path):
    nothing = {"proj/__init__.py": "", "proj/celery.py": ""}
    assert "no issues" in checked(tmp_path, "raise RuntimeError", **nothing)


def start_worker(directory: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "proj", "worker", "-P", "solo", "-l", "INFO"],
            cwd=directory,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def test_a_worker_does_not_start_with_wrong_options(tmp_path):
    write(tmp_path, {"shop/tasks.py": CHARGE.format("lock_key='order:{order}'")})
    log = tmp_path / "log"
    worker = start_worker(tmp_path, log)
    try:
        assert worker.wait(4 * PATIENCE) != 0
    finally:
        worker.kill()
        worker.wait()
    assert "names the argument 'order', which does not exist" in log.read_text()


def test_a_worker_logs_warnings_when_it_starts(tmp_path):
    write(tmp_path, {"shop/tasks.py": FORGOTTEN})
    log = tmp_path / "log"
    worker = start_worker(tmp_path, log)
    try:
        eventually(lambda: "django_dlock.W120" in log.read_text(), 4 * PATIENCE, log.read_text())
    finally:
        worker.terminate()
        worker.wait(PATIENCE)
    assert "W112" not in log.read_text()
