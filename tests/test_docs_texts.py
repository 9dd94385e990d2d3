"""The messages that the guides show are those of the code, also in what they insert.

A message is a text with fields. What a page shows in a field must be what may stand there: a number
for ``%d``, a quoted name for ``%r``; and where a field takes a sentence, that sentence is a message
of the code itself, or one of ``FOREIGN``.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "howto" / "troubleshooting.md"

NUMBER, QUOTED = r"-?[\d.]+", r"(?:'[^']*'|\"[^\"]*\")"
FOREIGN = {
    "no such table",
    "server closed the connection",
    "cannot execute UPDATE in a read-only transaction",
    "connection refused",
}
"""Messages of servers and of other packages."""
TASK = re.compile(r"(?<![\w.])([\w.]+)\[6f3a\]")


def of_format(text: str) -> str:
    """A pattern of a text with ``%`` fields."""
    kinds = {"d": NUMBER, "f": NUMBER, "g": NUMBER, "r": QUOTED, "s": "(.+)"}
    parts = re.split(r"%[-.\d]*([dfgrs])", text)
    texts, fields = parts[::2], parts[1::2]
    found = re.escape(texts[0])
    for kind, after in zip(fields, texts[1:], strict=True):
        found += kinds[kind] + re.escape(after)
    return found


def of_fstring(node: ast.JoinedStr) -> str:
    """A pattern of an f-string."""
    found = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            found += re.escape(part.value)
        elif isinstance(part, ast.FormattedValue):
            spec = ast.unparse(part.format_spec)[2:-1] if part.format_spec else ""
            is_quoted = part.conversion == ord("r")
            found += QUOTED if is_quoted else NUMBER if spec[-1:] in {*"dfg"} else "(.+)"
    return found


@functools.cache
def messages() -> list[re.Pattern[str]]:
    """Of all texts of the package; what a group matches is a text itself."""
    found: set[str] = set()
    for file in (ROOT / "django_dlock").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add(of_fstring(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(of_format(node.value))
    # A text with hardly anything but fields would match everything.
    return [re.compile(text) for text in found if len(re.sub(r"[^a-z]", "", text)) >= 12]


HOLDER = (
    r"((task [\w.]+\[\w+\]|request \S+), )?process \d+ on [\w-]+"
    r"(, since [\d-]+ [\d:]+ UTC \([\d.]+ s\))?"
)
PLACE = rf" \((lock '[^']*', )?alias '[^']*'\)(\. Holder: {HOLDER})?$"
"""What errors append to their messages."""


def is_said(shown: str) -> bool:
    """Whether the package says this."""
    shown = re.sub(PLACE, "", shown)
    # Another part of the code appends this.
    shown = re.sub(r" \(\S+ s left(; created at \S+)?\)$", "", shown)
    return any(
        all(map(may_stand_there, found.groups()))
        for message in messages()
        if (found := message.fullmatch(shown))
    )


def may_stand_there(inserted: str) -> bool:
    """Whether a field may contain this: a word, a task, or a message, perhaps a foreign one."""
    return (
        " " not in inserted
        or inserted in FOREIGN
        or re.fullmatch(r"Task [\w.]+\[\w+\]", inserted) is not None
        or is_said(inserted)
    )


def samples() -> Iterator[str]:
    page = GUIDE.read_text()
    for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL):
        yield from block.splitlines()
    lines = page.partition("## Log lines\n")[2]
    yield from re.findall(r"^`([^`]+)`\n: ", lines, re.MULTILINE)


@pytest.mark.parametrize("line", list(samples()))
def test_the_messages_of_the_guide_are_those_of_the_code(line: str) -> None:
    assert is_said(line), line


@pytest.mark.parametrize("line", [line for line in samples() if "[6f3a]" in line])
def test_a_task_in_a_message_is_introduced_as_one(line: str) -> None:
    """As the package does it everywhere, also in ``str()`` of what it inserts."""
    for name in TASK.findall(line):
        assert re.search(rf"\b[Tt]ask {re.escape(name)}\[", line), line


@pytest.mark.parametrize("line", [line for line in samples() if " is requeued " in line])
def test_a_requeue_names_only_the_process_of_the_holder(line: str) -> None:
    """It asks the backend nothing about it."""
    _, found, holder = line.partition("Holder: ")
    assert not found or re.fullmatch(r"process \d+ on [\w-]+", holder)
