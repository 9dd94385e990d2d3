"""Finds tests by their names, wherever they have moved."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

from tests.mutants.mutant import BrokenMutant, Mutant

CONTRACTS = "django_dlock/testing"
"""Has test methods that the test classes of the backends inherit."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class SuiteTest:
    node_id: str
    """As pytest takes it."""
    files: frozenset[str] = field(compare=False)
    """Its own file, and those of the classes that its class inherits from."""


@dataclass(frozen=True)
class _Class:
    path: str
    name: str
    bases: tuple[str, ...]
    tests: frozenset[str]


class Suite:
    """The tests below ``tests``, by each name that a mutant may give them."""

    def __init__(self, tree: Path) -> None:
        self._classes: dict[str, list[_Class]] = defaultdict(list)
        self._named: dict[str, set[SuiteTest]] = defaultdict(set)
        files = [
            (path, path.relative_to(tree).as_posix())
            for folder in ("tests", CONTRACTS)
            for path in sorted((tree / folder).rglob("*.py"))
        ]
        functions: list[tuple[str, str]] = []
        for file, path in files:
            text = file.read_text()
            # What has no test and no class that tests may inherit from need not be parsed.
            if "def test" not in text and "\nclass " not in text:
                continue
            try:
                tree_of_file = ast.parse(text, path)
            except SyntaxError as error:
                raise BrokenMutant(f"{path} is no valid Python: {error}") from error
            for node in _statements(tree_of_file):
                if isinstance(node, ast.ClassDef):
                    self._classes[node.name].append(_class(path, node))
                elif _is_test(node):
                    functions.append((path, node.name))
        for _, path in files:
            if _has_tests(path):
                self._add(SuiteTest(path, frozenset([path])), path, [Path(path).name])
        for path, name in functions:
            if _has_tests(path):
                self._add(SuiteTest(f"{path}::{name}", frozenset([path])), path, [name])
        for each in self._all_classes:
            self._add_class(each)

    @cached_property
    def _all_classes(self) -> list[_Class]:
        return [each for named in self._classes.values() for each in named]

    def _add(self, test: SuiteTest, path: str, names: Iterable[str]) -> None:
        for name in names:
            self._named[name].add(test)
            self._named[f"{Path(path).name}::{name}"].add(test)

    def _add_class(self, each: _Class) -> None:
        family = list(self._family(each, set()))
        is_case = any(base.endswith("TestCase") for one in family for base in one.bases)
        if not _has_tests(each.path) or not (each.name.startswith("Test") or is_case):
            return
        files = frozenset(one.path for one in family)
        node_id = f"{each.path}::{each.name}"
        self._add(SuiteTest(node_id, files), each.path, [each.name])
        for name in {name for one in family for name in one.tests}:
            names = [name, f"{each.name}::{name}"]
            self._add(SuiteTest(f"{node_id}::{name}", files), each.path, names)

    def _family(self, each: _Class, seen: set[str]) -> Iterator[_Class]:
        """The class and those that it inherits from, as far as they are ours."""
        yield each
        for base in each.bases:
            if base in seen:
                continue
            seen.add(base)
            found = self._classes.get(base, [])
            for one in [one for one in found if one.path == each.path] or found:
                yield from self._family(one, seen)

    def find(self, name: str) -> SuiteTest:
        """The test with this name: a function, method, class or file, maybe with ``[…]``.

        Raises:
            BrokenMutant: There is none, or more than one.
        """
        bare, bracket, parameters = name.partition("[")
        found = sorted(self._named.get(bare, ()))
        if not found:
            raise BrokenMutant(f"Test: {name}: there is no such test")
        if len(found) > 1:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            listed = ", ".join(test.node_id for test in found[:5]) + more
            raise BrokenMutant(f"Test: {name}: {len(found)} tests have this name: {listed}")
        return SuiteTest(f"{found[0].node_id}{bracket}{parameters}", found[0].files)

    def of(self, mutant: Mutant) -> list[SuiteTest]:
        """
        Raises:
            BrokenMutant: One of the mutant's tests is not found.
        """
        try:
            return [self.find(name) for name in mutant.tests]
        except BrokenMutant as error:
            raise BrokenMutant(f"{mutant.name}: {error}") from error


def _class(path: str, node: ast.ClassDef) -> _Class:
    names = (ast.unparse(base).rpartition(".")[2] for base in node.bases)
    tests = frozenset(each.name for each in _statements(node) if _is_test(each))
    return _Class(path, node.name, tuple(names), tests)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """What a module or a class says, also below an ``if`` or in a ``try``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(child)


def _is_test(node: ast.stmt) -> TypeGuard[Function]:
    return isinstance(node, Function) and node.name.startswith("test")


def _has_tests(path: str) -> bool:
    """Whether pytest looks for tests in this file."""
    return path.startswith("tests/") and Path(path).name.startswith("test_")
