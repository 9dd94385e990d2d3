"""The example backend in the documentation fulfils the contract."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

from django_dlock.backends.base import AliasOptions

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "write-a-backend.md"
SAMPLE = re.compile(r"^```python\n(# shop/.*?)^```$", re.MULTILINE | re.DOTALL)

module: Any = types.ModuleType("tests.backends.documented")
# Dataclasses look up the module of their class.
sys.modules[module.__name__] = module
for code in SAMPLE.findall(PAGE.read_text()):
    exec(code, vars(module))

TestSqliteBackend = module.TestSqliteBackend


def test_its_options_are_checked_as_those_of_our_backends() -> None:
    def problems(**given: Any) -> list[tuple[str, str]]:
        options = AliasOptions("it", "shop.locks.SqliteBackend", **given)
        return [problem[:2] for problem in module.SqliteBackend.problems(options)]

    assert problems(location="/run/it", options={"synchronous": "FULL"}) == []
    given = {"synchronous": "NEVER", "synchronus": 1}
    assert problems(options=given) == [
        ("E006", "DLOCKS['it'] has no 'LOCATION' to say where its locks are kept."),
        (
            "shop.E001",
            "DLOCKS['it']['OPTIONS'] has the unknown key 'synchronus'; did you mean 'synchronous'?",
        ),
        ("shop.E001", "DLOCKS['it']['OPTIONS']['synchronous'] is 'NEVER'."),
    ]
