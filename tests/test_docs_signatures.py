"""Each call that the reference shows takes the arguments that it shows, in the way it shows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import django_dlock
import django_dlock.testing
from django_dlock import DEFAULT, Lock
from django_dlock.backends.base import BaseLockBackend
from django_dlock.fencing import FencedInstance, FencedQuerySet
from django_dlock.models import IdempotencyRecord

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
ENTRY = re.compile(r"^(?:\| )?`([\w.]+(?:\(\w+\)\.\w+)?)\(([^`]*)\)`(?: \||$)", re.MULTILINE)
BLOCK = re.compile(r"^```text\n(?:@\w+\n)?@?(\w+)\(([^`]*)\)\n```$", re.MULTILINE)
CELERYS = {"replace", "shared_task"}
"""Calls of Celery's that the reference shows."""


class Shown(NamedTuple):
    """A call as a page shows it."""

    page: str
    section: str
    name: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.page}-{self.name}"


def shown() -> Iterator[Shown]:
    for page in ("api.md", "tasks.md", "views.md"):
        text = (REFERENCE / page).read_text()
        for pattern in (ENTRY, BLOCK):
            for found in pattern.finditer(text):
                section = re.findall(r"^##+ (.+)$", text[: found.start()], re.MULTILINE)
                if found[1] not in CELERYS:
                    yield Shown(page, section[-1] if section else "", found[1], found[2])


def public(call: Shown) -> Callable[..., Any]:
    """What the reader calls."""
    last = call.name.rpartition(".")[2]
    places: dict[str, Any] = {
        "Members": Lock,
        "locks": BaseLockBackend,
        "Testing": django_dlock.testing,
    }
    if call.name.startswith("IdempotencyRecord.objects."):
        owner: Any = IdempotencyRecord.objects
    elif call.name.startswith("lock.fence(instance)."):
        owner = FencedInstance
    elif call.name.startswith("lock.fence("):
        owner = FencedQuerySet
    elif call.name.startswith("lock."):
        owner = Lock
    else:
        owner = places.get(call.section, django_dlock)
    found: Callable[..., Any] = getattr(owner, last)
    return found


def of_text(arguments: str) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each argument in a call that a page shows."""
    given: dict[str, Any] = {"DEFAULT": DEFAULT, "timedelta": timedelta}
    exec(f"def call({arguments}): pass", given)
    return of_signature(given["call"])


def of_signature(function: Callable[..., Any]) -> list[tuple[str, str, Any]]:
    """The same of a function, without ``self``, arguments that it takes only to refuse them, and
    the view that a decorator gets if it stands there without parentheses.
    """
    return [
        (each.name, str(each.kind), each.default)
        for each in inspect.signature(function).parameters.values()
        if each.name != "self"
        and each.annotation != "Never"
        and each.kind is not inspect.Parameter.POSITIONAL_ONLY
    ]


@pytest.mark.parametrize("call", list(shown()), ids=str)
def test_a_call_in_the_reference_has_its_signature(call: Shown) -> None:
    assert of_text(call.arguments) == of_signature(public(call))


def test_the_calls_of_all_pages_are_found() -> None:
    found = {each.name for each in shown()}
    assert found >= {"Lock", "locked", "acquire", "list", "locked_view", "idempotent_view"}
