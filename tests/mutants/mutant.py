"""Reads the files ``*.mutant``; how to write one is in ``tests/README.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
GUARANTEES = ("ADMIN", "COST", *(f"G{number}" for number in range(1, 16)))


class BrokenMutant(Exception):
    """A mutant cannot be read, or its place or a test of it is not found; says why."""


@dataclass(frozen=True)
class Change:
    """Where a text is replaced, and by what."""

    where: str
    old: tuple[str, ...]
    new: tuple[str, ...]

    @classmethod
    def read(cls, section: str) -> Change:
        """One ``In:`` with the lines below it.

        Raises:
            BrokenMutant: A line has another sign than a diff's, or nothing is looked for.
        """
        where, *lines = section.rstrip().splitlines()
        # Editors strip the sign of an empty line.
        lines = [line or " " for line in lines]
        while lines and not lines[0].strip():
            del lines[0]
        if wrong := [line for line in lines if line[0] not in " -+"]:
            raise BrokenMutant(f"a line begins with none of ' ', '-' and '+': {wrong[0]}")
        change = cls(
            where.strip(),
            tuple(line[1:] for line in lines if line[0] != "+"),
            tuple(line[1:] for line in lines if line[0] != "-"),
        )
        if not any(line.strip() for line in change.old):
            raise BrokenMutant(f"In: {change.where} says no text to look for")
        if change.old == change.new:
            raise BrokenMutant(f"In: {change.where} changes nothing")
        return change


@dataclass(frozen=True)
class Mutant:
    """One file ``*.mutant``."""

    name: str
    """The folder and the name of its file, such as ``g05/own_grant_unknown``."""
    guarantee: str
    breaks: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]

    @classmethod
    def read(cls, name: str, text: str) -> Mutant:
        """
        Raises:
            BrokenMutant: The text is not one of a mutant.
        """
        head, *sections = re.split(r"^In:", text, flags=re.MULTILINE)
        fields = dict(re.findall(r"^(Guarantee|Breaks): (.+)$", head, re.MULTILINE))
        tests = re.findall(r"^Test: (\S+)$", head, re.MULTILINE)
        if set(fields) != {"Guarantee", "Breaks"} or not tests or not sections:
            raise BrokenMutant(f"{name} must say Guarantee:, Breaks:, Test: and In:")
        if fields["Guarantee"] not in GUARANTEES:
            raise BrokenMutant(f"{name}: {fields['Guarantee']} is none of {', '.join(GUARANTEES)}")
        try:
            changes = tuple(Change.read(section) for section in sections)
        except BrokenMutant as error:
            raise BrokenMutant(f"{name}: {error}") from error
        return cls(name, fields["Guarantee"], fields["Breaks"], tuple(tests), changes)

    def answers_to(self, word: str) -> bool:
        """Whether ``word`` is its guarantee, or a part of its name."""
        if word.upper() in GUARANTEES:
            return word.upper() == self.guarantee
        return word in (self.name if "/" in word else self.name.rpartition("/")[2])


def all_mutants(folder: Path = HERE) -> Iterator[Mutant]:
    # New mutants may be tried first as plain files beside this one.
    for file in sorted([*folder.glob("*/*.mutant"), *folder.glob("*.mutant")]):
        yield Mutant.read(file.relative_to(folder).with_suffix("").as_posix(), file.read_text())
