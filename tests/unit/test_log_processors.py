"""The examples of the guide on logging, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "logging.md"

LOSE = """
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django_dlock"],
    DLOCKS={"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}},
    LOGGING=LOGGING,
)
django.setup()

from django_dlock import LeaseLost, Lock, locks
from django_dlock.core import dispatch

lock = Lock("order:7", metadata={"task_id": "6f3a"})
lock.acquire()
print(lock.owner, lock.token)
Lock("order:7", bound=False).acquire(False)
locks["default"].break_("order:7", owner=lock.owner)
try:
    lock.renew()
except LeaseLost:
    assert dispatch.flush(10)
"""


def example(heading: str) -> str:
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found
    return found[1]


def lose(heading: str) -> tuple[str, int, list[str]]:
    """Owner and token of a lock that was lost, and the lines that were logged."""
    done = subprocess.run(
        [sys.executable, "-c", example(heading) + LOSE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    owner, token = done.stdout.split()
    return owner, int(token), done.stderr.splitlines()


def test_plain_text() -> None:
    owner, _, lines = lose("Plain text")
    contended, lost = lines
    assert contended.endswith("is held by someone else [owner=None task=None]")
    assert re.search(rf"was lost after .* broken \[owner={owner} task='6f3a'\]$", lost)


@pytest.mark.parametrize(
    ("heading", "module", "message", "level"),
    [
        ("JSON with python-json-logger", "pythonjsonlogger", "message", "levelname"),
        ("structlog", "structlog", "event", "level"),
    ],
)
def test_json(heading: str, module: str, message: str, level: str) -> None:
    pytest.importorskip(module)
    owner, token, lines = lose(heading)
    contended, lost = map(json.loads, lines)
    expected: dict[str, Any] = {
        "lock_name": "order:7",
        "lock_alias": "default",
        "lock_owner": owner,
        "lock_token": token,
        "task_id": "6f3a",
        "reason": "broken",
    }
    assert expected.items() <= lost.items()
    assert "was lost after" in lost[message]
    assert lost[level].lower() == "warning"
    assert contended["reason"] == "contended"
    assert contended["lock_name"] == "order:7"
    assert contended[level].lower() == "info"
    if message == "message":
        shown = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
        assert shown
        assert list(json.loads(shown[1])) == list(lost)
