"""What README and the tutorial tell their reader to type is typed, from an empty folder.

Each page is read from top to bottom in a new environment; pip finds the wheel of this tree there:

* a line of a ``console`` block is typed into the terminal that the page speaks of;
* a ``python`` block that names a file is added to that file; any other is pasted into the Python
  shell, as a ``pycon`` block is, whose output is compared;
* a ``text`` block is what has just been printed;
* what the page asks for in a sentence is a step of the test, which names the sentence.

Rewritten are only the addresses of Redis and of the site. ``NOT_TYPED`` names what is left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testproject.servers import RedisServer
from tests.support.page_reader import (
    FENCE,
    LOGGED,
    ROOT,
    SECRET,
    Reader,
    Step,
    Tab,
    Terminals,
    compare,
    pip,
)
from tests.support.terminal import PYTHON, SHELL, Terminal
from tests.support.wheel import build, copy_source
from tests.support.workers import eventually

IN_A_CLONE = [
    'pip install ".[celery]"',
    'pip install "/path/to/clone[redis,celery]"',
]
NOT_TYPED = {
    "make demo": "it lasts a minute; `.ci/run` runs it in a fresh clone",
    **dict.fromkeys(IN_A_CLONE, "test_a_clone_is_installed_as_the_pages_say"),
}
"""Commands that are not typed where they are read, and why."""
SITE = "http://127.0.0.1:8000"

pytestmark = [pytest.mark.project, pytest.mark.extended, pytest.mark.timeout(900)]


def wanted_python() -> tuple[str, str]:
    """Python 3.12 and its name, if there is one; otherwise the Python that runs this."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    installed = sorted(pyenv.glob("versions/3.12*/bin/python3"))
    for candidate in filter(None, [shutil.which("python3.12"), *map(str, installed)]):
        # A shim of pyenv may stand for no Python, and Debian has venv in another package.
        tried = [candidate, "-c", "import venv, ensurepip"]
        if not subprocess.run(tried, capture_output=True, check=False).returncode:
            return candidate, "python3.12"
    return sys.executable, f"python3.{sys.version_info.minor}"


PYTHON_3, NAME = wanted_python()


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_source(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="session")
def wheels(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip finds django-dlock."""
    return build(clone, tmp_path_factory.mktemp("wheels")).parent


OURS = ("CELERY_", "COVERAGE_", "DJANGO_", "DLOCK_", "PYTEST_", "PYTHON", "REDIS_", "VIRTUAL_ENV")
"""Beginnings of variables that no reader has."""


@pytest.fixture
def terminals(wheels: Path, tmp_path: Path) -> Iterator[Terminals]:
    """Terminals in which ``python3`` is the wanted Python."""
    (tmp_path / "bin").mkdir()
    # Not a link: a virtual environment would then take it for its home.
    (tmp_path / "bin/python3").write_text(f'#!/bin/sh\nexec "{PYTHON_3}" "$@"\n')
    (tmp_path / "bin/python3").chmod(0o755)
    found = os.environ.get("PIP_FIND_LINKS", "")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(OURS)},
        "PATH": f"{tmp_path / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "PIP_FIND_LINKS": f"{found} {wheels}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "LC_ALL": "C.UTF-8",
        "NO_COLOR": "1",
    }
    opened: list[Terminal] = []

    def open_one(folder: Path) -> Terminal:
        opened.append(Terminal(folder, env))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.close()


# -- the tutorial --------------------------------------------------------------------------


def open_a_second_terminal(reader: Reader) -> None:
    reader.here = reader.second = reader.terminals(reader.folder)


def leave_the_second_shell(reader: Reader) -> None:
    reader.second.leave_python()


def go_to_the_first(reader: Reader) -> None:
    reader.here = reader.first
    assert reader.first.prompt == PYTHON


def go_to_the_second(reader: Reader) -> None:
    reader.here = reader.second
    assert reader.second.prompt == SHELL


def restart(reader: Reader) -> None:
    reader.second.interrupt()
    reader.second.send("celery -A shop worker -l INFO")
    reader.first.leave_python()
    reader.first.run("python manage.py shell")


def see_the_log(reader: Reader) -> None:
    said = re.search(r"The log says so, too: `(.*)`", reader.text)
    logged = eventually(lambda: LOGGED.search(reader.first.text), why="the loss is logged")
    assert said
    compare(said[1], logged[0].strip())


def leave_the_first_shell(reader: Reader) -> None:
    reader.first.leave_python()


def log_in(reader: Reader) -> None:
    reader.browser.log_in("ada", SECRET)


def open_two_tabs(reader: Reader) -> None:
    tabs = [Tab(reader.browser, f"/checkout/?tab={number}") for number in (1, 2)]
    reader.answers = sorted((tab.close() for tab in tabs), key=lambda answer: answer.status)


def see_that_one_is_refused(reader: Reader) -> None:
    let_in, refused = reader.answers
    assert (let_in.status, let_in.text) == (200, "Thank you.")
    assert refused.status == 409
    assert refused.headers["Retry-After"]


def stop_the_worker(reader: Reader) -> None:
    reader.second.interrupt()
    go_to_the_second(reader)


def open_checkout(reader: Reader) -> None:
    reader.tab = Tab(reader.browser, "/checkout/", stays=True)


def see_the_lock_in_the_admin(reader: Reader) -> None:
    table, _, listed = reader.shown.partition("[")
    assert "checkout:1" in table
    assert [row["name"] for row in json.loads(f"[{listed}")] == ["checkout:1"]
    assert reader.tab
    assert "checkout:1" in reader.browser.open("/admin/django_dlock/heldlock/").text
    reader.tab.close()


TUTORIAL: dict[str, Step] = {
    "Open a second terminal in the same folder": open_a_second_terminal,
    "leave the Python shell in the second terminal (Ctrl-D)": leave_the_second_shell,
    "The first shell learns of this": go_to_the_first,
    "The log says so, too": see_the_log,
    "Start a worker in the second terminal.": go_to_the_second,
    "In the first shell, send the order twice.": go_to_the_first,
    "Restart the worker (Ctrl-C) and the shell (Ctrl-D)": restart,
    "Leave the first shell, create a user": leave_the_first_shell,
    f"Log in at `{SITE}/admin/`": log_in,
    f"Open `{SITE}/checkout/?tab=1`": open_two_tabs,
    "The second request gets `409 Conflict` with a `Retry-After` header.": see_that_one_is_refused,
    "Stop the worker": stop_the_worker,
    "open `/checkout/` once more": open_checkout,
    "In the admin, *Held locks* shows the same list": see_the_lock_in_the_admin,
}


@pytest.mark.parametrize("python", [NAME])
def test_a_reader_of_the_tutorial_gets_what_it_says(
    python: str, terminals: Terminals, tmp_path: Path, own_redis: RedisServer
) -> None:
    folder = tmp_path / "empty"
    reader = Reader("docs/tutorial.md", terminals, folder, own_redis, TUTORIAL, not_typed=NOT_TYPED)
    try:
        reader.read()
    finally:
        if reader.tab:
            reader.tab.close()


# -- README --------------------------------------------------------------------------------

OF_THE_READER = [
    "python3 -m venv venv",
    ". venv/bin/activate",
    'pip install Django "celery[redis]"',
    "django-admin startproject shop .",
]
"""README speaks to somebody who has a project with Celery."""
SITE_COMMANDS = [
    "python manage.py createsuperuser --username ada --email ada@example.com",
    "python manage.py runserver",
]
URL = """# urls.py
from shop.views import checkout

urlpatterns += [path("checkout/", checkout)]
"""


def with_a_project(reader: Reader) -> None:
    for command in OF_THE_READER:
        reader.command(f"$ {command}")
    reader.write("settings.py", 'INSTALLED_APPS = [..., "shop"]')
    for block in FENCE.finditer((ROOT / "docs/tutorial.md").read_text()):
        # README names the model of the tutorial.
        named = re.match(r"# (shop/(?:__init__|celery|models)\.py)\n", block[2])
        if named:
            reader.write(named[1], reader.rewritten(block[2]))
    reader.here.run("python manage.py makemigrations shop")


def start_a_shell(reader: Reader) -> None:
    reader.here.run("python manage.py shell")


def see_a_second_request_refused(reader: Reader) -> None:
    reader.write("urls.py", URL)
    reader.second = reader.here = reader.terminals(reader.folder)
    for command in (". venv/bin/activate", *SITE_COMMANDS):
        reader.command(reader.rewritten(f"$ {command}"))
    reader.here = reader.first
    reader.browser.log_in("ada", SECRET)
    assert reader.first.python('first = Lock("checkout:1")\nfirst.acquire()') == "True\n"
    refused = reader.browser.open("/checkout/")
    assert (refused.status, bool(refused.headers["Retry-After"])) == (409, True)
    reader.first.python("first.release()")
    assert reader.browser.open("/checkout/").text == "Thank you."


def see_one_row(reader: Reader) -> None:
    reader.second.interrupt()
    reader.second.send("celery -A shop worker -l INFO")
    eventually(lambda: reader.second.text.count(" succeeded in ") == 2, why="both have run")
    shown = reader.first.python("Effect.objects.filter(order_number=42).count()")
    assert shown == "1\n"


README: dict[str, Step] = {
    "## Install": with_a_project,
    "## A block": start_a_shell,
    "While one runs, a second request gets `409 Conflict`": see_a_second_request_refused,
    "The lock keeps runs from overlapping.": see_one_row,
}


@pytest.mark.parametrize("python", [NAME])
def test_a_reader_of_the_readme_gets_what_it_says(
    python: str, terminals: Terminals, tmp_path: Path, own_redis: RedisServer
) -> None:
    folder = tmp_path / "own"
    Reader("README.md", terminals, folder, own_redis, README, not_typed=NOT_TYPED).read()


@pytest.mark.parametrize("command", IN_A_CLONE)
def test_a_clone_is_installed_as_the_pages_say(
    command: str, terminals: Terminals, tmp_path: Path
) -> None:
    pages = "".join((ROOT / page).read_text() for page in ("README.md", "docs/tutorial.md"))
    assert f"`{command}`" in pages
    clone = copy_source(tmp_path / "clone")
    terminal = terminals(clone)
    terminal.run("python3 -m venv ../venv")
    terminal.run(". ../venv/bin/activate")
    assert "django-dlock-0.1.0" in pip(terminal, command.replace("/path/to/clone", str(clone)))
