"""Turns the uncommitted changes of the working tree into a mutant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.mutants.mutant import BrokenMutant, Change
from tests.mutants.places import MODULE, SOURCES, Package, Source
from tests.mutants.selection import git

NEAR = 3
"""With at most so many lines between them, two changes are in one section."""
MOST_CONTEXT = 12
"""Lines before and after a change."""

Operation = tuple[str, int, int, int, int]


def from_diff(tree: Path) -> str:
    """The sections of all changes in ``tree`` since its last commit.

    Raises:
        BrokenMutant: Nothing is changed, or a place could not be told from another one.
    """

    package = Package.read(tree)
    names = git(tree, "diff", "--name-only", "--no-renames", "-z", "HEAD", "--", *SOURCES)
    paths = [path for path in names.split("\0") if path in package.sources]
    now = {path: package.sources[path].text for path in paths}
    texts = {path: source.text for path, source in package.sources.items()}
    before = Package({**texts, **{path: git(tree, "show", f"HEAD:{path}") for path in paths}})
    written = [each for path in paths for each in sections(before, path, now[path])]
    if not written:
        raise BrokenMutant(f"nothing in {' or '.join(SOURCES)} is changed")
    return "\n".join(written)


def sections(package: Package, path: str, text: str) -> Iterator[str]:
    """A section for each change from the package's file to ``text``."""
    source = package.sources[path]
    new = text.split("\n")
    matcher = difflib.SequenceMatcher(None, source.lines, new, autojunk=False)
    operations = matcher.get_opcodes()
    for first, last in _groups(source, operations):
        yield _section(package, source, new, operations[first : last + 1])


def _groups(source: Source, operations: Sequence[Operation]) -> Iterator[tuple[int, int]]:
    """The first and the last operation of each section."""
    changes = [index for index, each in enumerate(operations) if each[0] != "equal"]
    while changes:
        first = last = changes.pop(0)
        while changes:
            start, following = operations[first][1], operations[changes[0]]
            near = following[1] - operations[last][2] <= NEAR
            # One section does not reach from one function into the next.
            if not near or _innermost(source, start, following[2]) != _innermost(
                source, start, operations[last][2]
            ):
                break
            last = changes.pop(0)
        yield first, last


def _section(
    package: Package, source: Source, new: Sequence[str], operations: Sequence[Operation]
) -> str:
    """The section with the least context that has one place only."""
    start, end = operations[0][1], operations[-1][2]
    for size in range(MOST_CONTEXT):
        for above in range(size, -1, -1):
            first, last = start - above, end + size - above
            if first < 0 or last > len(source.lines) or first == last:
                continue
            if (above and not source.lines[first].strip()) or (
                size > above and not source.lines[last - 1].strip()
            ):
                continue
            lines = [f" {line}" for line in source.lines[first:start]]
            for kind, old_from, old_to, new_from, new_to in operations:
                if kind == "equal":
                    lines += (f" {line}" for line in source.lines[old_from:old_to])
                else:
                    lines += (f"-{line}" for line in source.lines[old_from:old_to])
                    lines += (f"+{line}" for line in new[new_from:new_to])
            lines += (f" {line}" for line in source.lines[end:last])
            where = _innermost(source, first, last)
            if source.is_python:
                where = _shortest_name(package, where)
            section = "\n".join([f"In: {where}", *(line.rstrip() for line in lines), ""])
            if len(package.find(Change.read(section.removeprefix("In:")))) == 1:
                return section
    raise BrokenMutant(f"{source.path}:{start + 1} cannot be told from other places")


def _innermost(source: Source, first: int, last: int) -> str:
    """The qualified name of the smallest definition that holds these lines."""
    around = [
        (len(lines), name)
        for name, lines in source.definitions
        if lines.start <= first and last <= lines.stop
    ]
    return min(around)[1] if around else MODULE


def _shortest_name(package: Package, name: str) -> str:
    """The name without the classes and functions that no reader needs to find it."""
    parts = name.split(".")
    for size in range(1, len(parts)):
        short = ".".join(parts[-size:])
        if sum(len(list(each.named(short))) for each in package.sources.values()) == 1:
            return short
    return name
