"""The project keeps its own rules, and what is built from it works somewhere else."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import django_dlock

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.project


def run(
    *command: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    # The tests' own settings must not reach a tool that brings its own.
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
        pytest.skip(f"{name} is not installed beside {sys.executable}")
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


def test_the_version_is_told_once_and_the_same() -> None:
    assert django_dlock.__version__ == setup()["metadata"]["version"]


def test_the_extras_bring_what_a_worker_on_redis_imports() -> None:
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
    """The wheel of a clean copy: what lies about in the tree must not get in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = run("git", "ls-files", "-co", "--exclude-standard")
    # Outside a repository, as in an unpacked sdist, everything is taken.
    files = listed.stdout.splitlines() if listed.returncode == 0 else _all_files()
    for name in files:
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    succeeds(sys.executable, "-m", "build", "--outdir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


def _all_files() -> list[str]:
    return [str(file.relative_to(ROOT)) for file in ROOT.rglob("*") if ".venv" not in file.parts]


def test_the_wheel_carries_what_is_not_python(wheel: Path) -> None:
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


@pytest.mark.timeout(300)
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    succeeds(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    succeeds(python, "-m", "pip", "install", "--quiet", str(wheel))
    (tmp_path / "site_settings.py").write_text(SITE)
    site = {"DJANGO_SETTINGS_MODULE": "site_settings", "PYTHONPATH": str(tmp_path)}
    installed = succeeds(python, "-c", USE, cwd=tmp_path, env=site).stdout.strip()
    assert Path(installed).is_relative_to(tmp_path / "venv")
    # No extra is installed: neither Celery nor a client library may be needed.
    for command in (["check"], ["migrate", "-v0"], ["makemigrations", "--check", "--dry-run"]):
        succeeds(python, "-m", "django", *command, cwd=tmp_path, env=site)
    listed = succeeds(python, "-m", "django", "list_locks", cwd=tmp_path, env=site)
    assert listed.returncode == 0
