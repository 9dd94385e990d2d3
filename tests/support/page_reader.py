"""A reader who does what a page says: types, pastes, edits files, and opens pages of the site."""

from __future__ import annotations

import ast
import doctest
import http.client
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping
from http.cookiejar import CookieJar
from pathlib import Path
from typing import NamedTuple

import pytest

from testproject.servers import RedisServer, free_port
from tests.support.terminal import Terminal
from tests.support.wheel import need_network
from tests.support.workers import eventually

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"`((?:pip|python3?|make|celery|django-admin|git|docker) [^`]*)`")
"""A command within a sentence."""
REDIS = "redis://localhost:6379/0"
SECRET = "a-long-secret-of-ada"
LOGGED = re.compile(r"Lock 'invoice:42' \(alias 'default'\) was lost after [\d.]+ s: broken\n")
"""Comes from a thread, and so at any time."""

Terminals = Callable[[Path], Terminal]


class Answer(NamedTuple):
    status: int
    text: str
    headers: Mapping[str, str]


class Browser:
    """Keeps cookies, and follows redirects."""

    def __init__(self, site: str) -> None:
        self.site, self._cookies = site, CookieJar()
        cookies = urllib.request.HTTPCookieProcessor(self._cookies)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)

    def open(self, path: str, form: Mapping[str, str] | None = None) -> Answer:
        data = urllib.parse.urlencode(form).encode() if form else None
        try:
            with self._opener.open(self.site + path, data, timeout=120) as answer:
                return Answer(answer.status, answer.read().decode(), answer.headers)
        except urllib.error.HTTPError as refused:
            with refused:
                return Answer(refused.code, refused.read().decode(), refused.headers)

    def is_up(self) -> bool:
        try:
            return self.open("/admin/login/").status == 200
        except (OSError, http.client.HTTPException):
            return False

    def log_in(self, user: str, password: str) -> None:
        eventually(self.is_up, why="the site answers")
        self.open("/admin/login/")
        token = next(cookie.value for cookie in self._cookies if cookie.name == "csrftoken")
        form = {"username": user, "password": password, "csrfmiddlewaretoken": token or ""}
        assert "Log out" in self.open("/admin/login/?next=/admin/", form).text


class Tab:
    """Loads a page, in the background; again and again until ``close`` if it is to stay."""

    def __init__(self, browser: Browser, path: str, stays: bool = False) -> None:
        self._browser, self._path, self._stays = browser, path, stays
        self._thread = threading.Thread(target=self._load)
        self._thread.start()

    def _load(self) -> None:
        self._answer = self._browser.open(self._path)
        while self._stays:
            self._browser.open(self._path)

    def close(self) -> Answer:
        """What came first."""
        self._stays = False
        self._thread.join()
        return self._answer


Step = Callable[["Reader"], None]


class Reader:
    """Does what a page says, from top to bottom.

    Args:
        page: Below the root.
        terminals: Opens a terminal.
        folder: Is made, for the project.
        redis: In place of the page's.
        steps: Sentence of the page → what its reader then does, in the page's order.
        not_typed: Commands in sentences that are left out.
    """

    def __init__(
        self,
        page: str,
        terminals: Terminals,
        folder: Path,
        redis: RedisServer,
        steps: Mapping[str, Step],
        *,
        not_typed: Collection[str],
    ) -> None:
        self.text, self.terminals, self.folder = (ROOT / page).read_text(), terminals, folder
        self.redis, self.steps, self.not_typed = redis, steps, not_typed
        self.folder.mkdir()
        self.first = self.here = terminals(folder)
        self.second = self.first
        self.address = f"127.0.0.1:{free_port()}"
        self.browser = Browser(f"http://{self.address}")
        self.shown = ""
        self.answers: list[Answer] = []
        self.tab: Tab | None = None

    def read(self) -> None:
        done: list[str] = []
        end = 0
        for block in FENCE.finditer(self.text):
            done += self._sentences(self.text[end : block.start()])
            self._block(block[1], self.rewritten(block[2]))
            end = block.end()
        done += self._sentences(self.text[end:])
        assert done == [*self.steps], "sentences that the test expects, in this order"

    def rewritten(self, code: str) -> str:
        return code.replace(REDIS, self.redis.url).replace("runserver", f"runserver {self.address}")

    def _sentences(self, text: str) -> Iterator[str]:
        for command in COMMAND.findall(text):
            assert command in self.not_typed, command
        for sentence in sorted((each for each in self.steps if each in text), key=text.index):
            self.steps[sentence](self)
            yield sentence

    def _block(self, language: str, code: str) -> None:
        match language:
            case "console":
                self.shown = "".join(self.command(line) for line in code.splitlines())
            case "python":
                named = re.match(r"# ([\w/]+\.py)\n", code)
                if named:
                    self.write(named[1], code)
                else:
                    self.shown = self.here.python(code)
                    assert "Traceback" not in self.shown, self.shown
            case "pycon":
                for example in doctest.DocTestParser().get_examples(code):
                    shown = LOGGED.sub("", self.here.python(example.source))
                    compare(example_text(example), shown)
            case "text":
                compare(code, self.shown)
            case _:
                pytest.fail(f"a block that this test does not know: {language}")

    def command(self, line: str) -> str:
        assert line.startswith("$ "), line
        command = line.removeprefix("$ ")
        if command.startswith("pip "):
            return pip(self.here, command)
        if " worker" in command or " runserver " in command:
            # They do not end.
            self.here.send(command)
            return ""
        if " createsuperuser " in command:
            self.here.type(command)
            return self.here.answer(SECRET) + self.here.answer(SECRET)
        return self.here.run(command)

    def write(self, name: str, code: str) -> None:
        """Add to a file; what is in its lists stays."""
        file = self.folder / name if "/" in name else self.folder / "shop" / name
        before = file.read_text() if file.exists() else ""
        if file.name == "settings.py":
            before, code = add_to_lists(before, code)
        file.write_text(f"{before}\n\n{code}")


def add_to_lists(before: str, code: str) -> tuple[str, str]:
    """``before`` with what the lists of the code have behind ``...``; and the rest of the code."""
    for given in ast.parse(code).body:
        if isinstance(given, ast.Assign) and isinstance(given.value, ast.List):
            name = ast.unparse(given.targets[0])
            added = ", ".join(ast.unparse(item) for item in given.value.elts[1:])
            assert f"{name} = [" in before
            before = before.replace(f"{name} = [", f"{name} = [{added}, ")
            code = code.replace(ast.get_source_segment(code, given) or "", "")
    return before, code


def pip(terminal: Terminal, command: str) -> str:
    """Install; without a network, skip at home and fail in CI."""
    shown = terminal.type(command)
    if "Successfully installed" not in shown:
        need_network(shown)
        pytest.fail(shown)
    return shown


def example_text(example: doctest.Example) -> str:
    return example.want if example.exc_msg is None else f"Traceback ...{example.exc_msg}"


def compare(wanted: str, shown: str) -> None:
    same = doctest.OutputChecker().check_output(wanted, shown, doctest.ELLIPSIS)
    assert same, f"the page says:\n{wanted}\nprinted was:\n{shown}"
