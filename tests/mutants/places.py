"""Finds the text that a mutant replaces, wherever it has moved."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.mutants.mutant import BrokenMutant, Change, Mutant

SOURCES = ("django_dlock",)
"""The folders whose files mutants change."""
SUFFIXES = {".css", ".html", ".js", ".lua", ".py", ".sql", ".txt", ".yml"}
MODULE = "module"
"""As the name of a place: anywhere in the Python files, such as among imports."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, order=True)
class Place:
    path: str
    """Relative to the tree."""
    line: int
    """The first one, counted from 0."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line + 1}"


@dataclass(frozen=True)
class Block:
    """Lines without their common indentation, by which they are compared."""

    indentation: str
    lines: tuple[str, ...]

    @classmethod
    def of(cls, lines: Sequence[str]) -> Block:
        filled = [line for line in lines if line.strip()]
        indentation = min((_indentation(line) for line in filled), key=len, default="")
        return cls(
            indentation,
            tuple(line[len(indentation) :] if line.strip() else "" for line in lines),
        )


class Source:
    """One file of the package."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.lines = text.split("\n")
        self.is_python = path.endswith(".py")

    @cached_property
    def definitions(self) -> list[tuple[str, range]]:
        """The qualified name and the lines of each function, class, constant and attribute."""
        if not self.is_python:
            return [(Path(self.path).name, range(len(self.lines)))]
        return list(_definitions(_parse(self.text, self.path)))

    def named(self, where: str) -> Iterator[range]:
        """The lines of each definition here that ``where`` names."""
        if where == MODULE:
            if self.is_python:
                yield range(len(self.lines))
            return
        # Most files need not be parsed.
        if self.is_python and where.rpartition(".")[2] not in self.text:
            return
        for name, lines in self.definitions:
            if name == where or (self.is_python and name.endswith(f".{where}")):
                yield lines

    def find(self, old: Sequence[str], lines: range) -> Iterator[int]:
        """The first line of each place among ``lines`` where ``old`` is."""
        wanted = Block.of(old)
        first = old[0].strip()
        for start in range(lines.start, lines.stop - len(old) + 1):
            if (
                self.lines[start].strip() == first
                and Block.of(self.lines[start : start + len(old)]).lines == wanted.lines
            ):
                yield start

    def may_hold(self, old: Sequence[str]) -> bool:
        """False if a line of ``old`` is nowhere in the file."""
        return all(line.strip() in self.text for line in old)


class Package:
    """The package's files, as they were when it was made."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.sources = {path: Source(path, text) for path, text in texts.items()}

    @classmethod
    def read(cls, tree: Path) -> Package:
        return cls(
            {
                path.relative_to(tree).as_posix(): path.read_bytes().decode()
                for folder in SOURCES
                for path in sorted((tree / folder).rglob("*"))
                if path.suffix in SUFFIXES
            }
        )

    def find(self, change: Change) -> list[Place]:
        """Every place of the change."""
        places = {
            Place(source.path, line)
            for source in self.sources.values()
            if source.may_hold(change.old)
            for lines in source.named(change.where)
            for line in source.find(change.old, lines)
        }
        return sorted(places)

    def place(self, change: Change) -> Place:
        """The only place of the change.

        Raises:
            BrokenMutant: There is none, or more than one.
        """
        places = self.find(change)
        if len(places) == 1:
            return places[0]
        text = "\n".join(f"    {line}" for line in Block.of(change.old).lines)
        raise BrokenMutant(f"In: {change.where}: {self._what_is_wrong(change, places)}:\n{text}")

    def _what_is_wrong(self, change: Change, places: list[Place]) -> str:
        if places:
            return f"this text is in {len(places)} places ({_listed(places)})"
        elsewhere = [
            Place(source.path, line)
            for source in self.sources.values()
            if source.may_hold(change.old)
            for line in source.find(change.old, range(len(source.lines)))
        ]
        named = [
            Place(source.path, lines.start)
            for source in self.sources.values()
            for lines in source.named(change.where)
        ]
        here = f"{change.where} is in {_listed(named)}" if named else "nothing has this name"
        there = f"only in {_listed(elsewhere)}" if elsewhere else "nowhere"
        return f"{here}, and this text is {there}"

    def changed(self, mutant: Mutant) -> dict[str, str]:
        """The path of each file that the mutant changes, and the file's text then.

        Raises:
            BrokenMutant: A change has no place or several, two have the same, or what they
                leave is not Python.
        """
        try:
            return self._changed(mutant.changes)
        except BrokenMutant as error:
            raise BrokenMutant(f"{mutant.name}: {error}") from error

    def _changed(self, changes: Sequence[Change]) -> dict[str, str]:
        placed = sorted(
            ((self.place(change), change) for change in changes),
            key=lambda each: each[0],
            # From the last line to the first, so that a change moves none that is still to come.
            reverse=True,
        )
        texts: dict[str, list[str]] = {}
        before: dict[str, int] = {}
        for place, change in placed:
            lines = texts.setdefault(place.path, [*self.sources[place.path].lines])
            end = place.line + len(change.old)
            if end > before.get(place.path, len(lines)):
                raise BrokenMutant(f"In: {change.where}: two changes meet in {place}")
            lines[place.line : end] = _replacement(change, lines[place.line : end])
            before[place.path] = place.line
        changed = {path: "\n".join(lines) for path, lines in texts.items()}
        for path, text in changed.items():
            if self.sources[path].is_python:
                _parse(text, path)
        return changed


def _definitions(
    node: ast.AST, prefix: str = "", *, is_body: bool = False
) -> Iterator[tuple[str, range]]:
    """``is_body``: in a function, whose variables need no name, as the function has one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name = f"{prefix}{child.name}"
            first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
            yield name, range(first - 1, child.end_lineno or child.lineno)
            yield from _definitions(child, f"{name}.", is_body=not isinstance(child, ast.ClassDef))
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            for target in targets:
                if isinstance(target, ast.Name) and not is_body:
                    lines = range(child.lineno - 1, child.end_lineno or child.lineno)
                    yield f"{prefix}{target.id}", lines
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            # A definition may stand below an ``if`` or in a ``try``.
            yield from _definitions(child, prefix, is_body=is_body)


def _parse(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text, path)
    except SyntaxError as error:
        raise BrokenMutant(f"{path}:{error.lineno} is not Python: {error.msg}") from error


def _replacement(change: Change, found: Sequence[str]) -> Iterator[str]:
    """The new lines, indented as the text is that was found."""
    indentation = Block.of(found).indentation
    usual = len(Block.of(change.old).indentation)
    for line in change.new:
        if not line.strip():
            yield line
            continue
        own = len(_indentation(line))
        if own >= usual:
            yield indentation + line[usual:]
        elif len(indentation) >= usual - own:
            yield indentation[: len(indentation) - (usual - own)] + line[own:]
        else:
            raise BrokenMutant(f"In: {change.where}: no room to the left for {line.strip()}")


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _listed(places: Sequence[Place]) -> str:
    more = f" and {len(places) - 5} more" if len(places) > 5 else ""
    return ", ".join(str(place) for place in places[:5]) + more
