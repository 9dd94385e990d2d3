"""The project follows its own rules, and the wheel built from it works elsewhere."""

from __future__ import annotations

import configparser
import email
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import django_dlock
from tests.conftest import missing
from tests.support.wheel import build, copy_source
from tests.support.workers import eventually

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.project


def run(
    *command: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    # The settings of the tests must not reach a tool that has its own.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")}
    return subprocess.run(
        command, cwd=cwd, env={**clean, **(env or {})}, capture_output=True, text=True, check=False
    )


def succeeds(
    *command: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = run(*command, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def tool(name: str) -> str:
    path = BIN / name
    if not path.exists():
        missing(f"{name} is not installed beside {sys.executable}")
    return str(path)


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


# -- rules ---------------------------------------------------------------------------------


def test_ruff_finds_nothing() -> None:
    succeeds(tool("ruff"), "check", ".")


def test_the_code_is_formatted() -> None:
    succeeds(tool("ruff"), "format", "--check", ".")


@pytest.mark.timeout(300)
def test_mypy_accepts_the_package_and_code_that_uses_it() -> None:
    succeeds(tool("mypy"))


def test_imports_point_downwards() -> None:
    succeeds(tool("lint-imports"), "--config", "setup.cfg", "--no-cache")


def test_the_version_is_defined_once_and_consistently() -> None:
    assert django_dlock.__version__ == setup()["metadata"]["version"]


def test_the_extras_contain_what_a_worker_on_redis_imports() -> None:
    """``celery[redis]`` would, but in Celery 5.5 it refuses the redis-py that locks need."""
    extras = setup()["options.extras_require"]
    asked = {line.strip() for name in ("redis", "celery") for line in extras[name].splitlines()}
    installed = {re.split(r"[<>=]", requirement)[0] for requirement in asked}
    wanted = [
        requirement
        for requirement in importlib.metadata.requires("kombu") or []
        if re.search(r"extra == .redis.", requirement)
    ]
    assert wanted
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in wanted} <= installed


# -- wheel ---------------------------------------------------------------------------------

SITE = """
INSTALLED_APPS = [
    "django.contrib.contenttypes", "django.contrib.auth", "django.contrib.messages",
    "django.contrib.sessions", "django.contrib.admin", "django_dlock",
]
SECRET_KEY = "x"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.sqlite3"}}
DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
TEMPLATES = [{
    "BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
    "OPTIONS": {"context_processors": [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]},
}]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
"""

USE = """
import django; django.setup()
from django_dlock import Lock, locked
with Lock("invoice:42") as lock:
    assert lock.held and lock.token
assert not lock.held
@locked("rebuild:{number}")
def rebuild(number): return number
assert rebuild(7) == 7
print(django.apps.apps.get_app_config("django_dlock").path)
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy_source(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("dist"))


def test_the_wheel_contains_files_that_are_not_python(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "django_dlock").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert "django_dlock/py.typed" in wanted
    assert wanted - inside == set()
    assert {name.split("/")[0] for name in inside - wanted} == {
        f"django_dlock-{django_dlock.__version__}.dist-info"
    }


def test_a_package_index_accepts_what_is_built(wheel: Path) -> None:
    built = [str(file) for file in wheel.parent.iterdir()]
    assert {Path(file).suffix for file in built} == {".whl", ".gz"}
    succeeds(tool("twine"), "check", "--strict", *built)


def test_the_page_on_a_package_index_needs_no_other_file(wheel: Path) -> None:
    """An index shows one file: links and pictures that are relative lead nowhere there."""
    try:
        from readme_renderer import markdown
    except ImportError:
        missing("readme-renderer is not installed")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = markdown.render(metadata.get_payload(decode=True).decode())
    assert page
    assert "<h1" in page
    assert re.findall(r'(?:href|src)="(?!https://|#)[^"]*"', page) == []


@pytest.fixture(scope="session")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the wheel and its dependencies only."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    succeeds(sys.executable, "-m", "venv", str(venv))
    python = str(venv / "bin" / "python")
    succeeds(python, "-m", "pip", "install", "--quiet", str(wheel))
    return python


@pytest.mark.timeout(300)
def test_the_wheel_works_in_an_empty_environment(bare_python: str, tmp_path: Path) -> None:
    python = bare_python
    (tmp_path / "site_settings.py").write_text(SITE)
    site = {"DJANGO_SETTINGS_MODULE": "site_settings", "PYTHONPATH": str(tmp_path)}
    installed = succeeds(python, "-c", USE, cwd=tmp_path, env=site).stdout.strip()
    assert Path(installed).is_relative_to(Path(python).parent.parent)
    # No extra is installed: it must work without Celery and without client libraries.
    for command in (["check"], ["migrate", "-v0"], ["makemigrations", "--check", "--dry-run"]):
        succeeds(python, "-m", "django", *command, cwd=tmp_path, env=site)
    listed = succeeds(python, "-m", "django", "list_locks", cwd=tmp_path, env=site)
    assert listed.returncode == 0


# -- a new project -------------------------------------------------------------------------

SET_UP = "import sys, django; django.setup(); from django_dlock import Lock\n"

HOLD = """
with Lock("x", ttl=float(sys.argv[1])) as lock:
    print("held", flush=True)
    sys.stdin.readline()
"""

TRY = """
lock = Lock("x", wait=0)
print(lock.acquire())
lock.locked() and lock.held and lock.release()
"""

COUNT = """
from pathlib import Path
counter = Path("counter")
for _ in range(25):
    with Lock("counter"):
        counter.write_text(str(int(counter.read_text()) + 1))
"""

ADMIN = """
from django.contrib.auth.models import User
from django.test import Client
client = Client(SERVER_NAME="localhost")
client.force_login(User.objects.create_superuser("admin"))
print(client.get("/admin/django_dlock/heldlock/").content.decode())
"""


class NewProject:
    """A project from ``startproject`` with one more line; no server runs for it."""

    def __init__(self, python: str, directory: Path) -> None:
        self.python, self.directory = python, directory
        self.env = {"DJANGO_SETTINGS_MODULE": "shop.settings", "PYTHONPATH": str(directory)}
        succeeds(python, "-m", "django", "startproject", "shop", str(directory))
        settings = directory / "shop" / "settings.py"
        text = settings.read_text()
        settings.write_text(text.replace("INSTALLED_APPS = [", 'INSTALLED_APPS = ["django_dlock",'))
        self.manage("migrate", "-v0")

    def manage(self, *arguments: str) -> str:
        return succeeds(self.python, "manage.py", *arguments, cwd=self.directory).stdout

    def runs(self, script: str) -> str:
        """The output of a process that ends."""
        command = (self.python, "-c", SET_UP + script)
        return succeeds(*command, cwd=self.directory, env=self.env).stdout.strip()

    def starts(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        """A process that the test must end."""
        return subprocess.Popen(
            [self.python, "-c", SET_UP + script, *arguments],
            cwd=self.directory,
            env={**os.environ, **self.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def lock(self, field: str) -> Any:
        """What ``list_locks`` shows about the lock; ``None`` if it is not listed."""
        found = json.loads(self.manage("list_locks", "--format", "json"))
        return found[0][field] if found else None


@pytest.fixture
def project(bare_python: str, tmp_path: Path) -> NewProject:
    return NewProject(bare_python, tmp_path)


@contextmanager
def holding(project: NewProject, ttl: int) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock; killed at the end if it is still running."""
    with project.starts(HOLD, str(ttl)) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.mark.timeout(600)
def test_a_new_project_is_guarded_with_one_line_and_no_server(project: NewProject) -> None:
    assert "no issues" in project.manage("check")
    with holding(project, 3) as holder:
        assert project.runs(TRY) == "False"
        eventually(lambda: project.lock("renewals") >= 2, why="the lease is renewed")
        holder.communicate("\n")
    assert holder.returncode == 0
    assert project.runs(TRY) == "True"
    (project.directory / "counter").write_text("0")
    counting = [project.starts(COUNT) for _ in range(2)]
    for process in counting:
        with process:
            process.communicate()
        assert process.returncode == 0
    assert (project.directory / "counter").read_text() == "50"


@pytest.mark.timeout(600)
def test_operators_of_a_new_project_see_and_clear_what_a_killed_process_held(
    project: NewProject,
) -> None:
    with holding(project, 600) as holder:
        assert project.lock("holder_state") == "alive"
        holder.kill()
    assert project.lock("holder_state") == "dead"
    page = project.runs(ADMIN)
    assert "<th" in page
    assert re.search(r">\s*x\s*<", page)
    project.manage("clear_stale_locks")
    assert project.lock("name") is None
