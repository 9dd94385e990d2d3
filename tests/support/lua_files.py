"""What the files of Lua say about themselves, and the names that their code uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import django_dlock
from django_dlock.backends.redis.lua_source import CONSTANTS, code
from django_dlock.backends.redlock.scripts import KEPT_OUT

ALL_CONSTANTS = {**CONSTANTS, "KEPT_OUT": KEPT_OUT}

_BACKENDS = Path(django_dlock.__file__).parent / "backends"
_KEYWORDS = """and break do else elseif end false for function if in local nil not or repeat return
    then true until while"""


@dataclass(frozen=True)
class LuaFile:
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def header(self) -> list[str]:
        """The comment at the top, without its signs."""
        end = next(number for number, line in enumerate(self.lines) if not line.startswith("--"))
        return [line.removeprefix("--").removeprefix(" ") for line in self.lines[:end]]

    def section(self, title: str) -> list[str]:
        """The names below a title of the header. ``owner...`` are any number, ``owner?`` may lack.

        Raises:
            ValueError: The header does not have the title.
        """
        if f"{title}: none" in self.header:
            return []
        names = []
        for line in self.header[self.header.index(f"{title}:") + 1 :]:
            if not line.startswith("  "):
                break
            if found := re.match(r"  (\w+(?:\.\.\.|\?)?)(?:: .+)?$", line):
                names.append(found[1])
        return names

    @cached_property
    def needs(self) -> list[str]:
        """What a part needs before it: names, and other parts."""
        found = re.search(r"Needs: ([^.]*)", " ".join(self.header))
        return re.findall(r"\w+", found[1]) if found else []

    @cached_property
    def included(self) -> list[str]:
        return [found[1] for line in self.lines if (found := re.match("--- include (.*)", line))]

    @cached_property
    def code(self) -> list[str]:
        """As it is sent."""
        return code(self.path, ALL_CONSTANTS).splitlines()

    @cached_property
    def own_code(self) -> list[str]:
        """Its lines of code, without what it includes."""
        return [line for line in self.lines if line and not line.lstrip().startswith("--")]

    @cached_property
    def offers(self) -> set[str]:
        """What a part declares for those that include it."""
        outer = [line for line in self.own_code if line.startswith("local")]
        return {name for line in outer for name in declared(line.partition("(")[0])}


COMMANDS = [LuaFile(path) for path in sorted(_BACKENDS.glob("*/lua/*.lua"))]
PARTS = {path.stem: LuaFile(path) for path in sorted(_BACKENDS.glob("redis/lua/shared/*.lua"))}


def declared(*lines: str) -> Iterator[str]:
    """The names that lines of code declare, in their order."""
    for line in map(_without_texts, lines):
        for names in re.findall(r"\b(?:local function|local|for) ([\w, ]+)", line):
            yield from re.findall(r"\w+", names.partition(" in ")[0])
        for names in re.findall(r"\bfunction\b[ \w]*\(([\w, ]*)", line):
            yield from re.findall(r"\w+", names)


def used(lines: Iterable[str]) -> set[str]:
    """The names in lines of code that do not only declare them, without those of fields."""
    names: set[str] = set()
    for line in map(_without_texts, lines):
        plain = re.sub(r"^\s*(local function \w+\([\w, .]*\)|local [\w, ]+)", "", line)
        plain = re.sub(r"([{,]\s*)\w+ =(?!=)", r"\1", plain)
        names.update(re.findall(r"(?<![\w.:])[A-Za-z_]\w*", plain))
    return names.difference(_KEYWORDS.split())


def _without_texts(line: str) -> str:
    return re.sub(r"'[^']*'", "''", line)
