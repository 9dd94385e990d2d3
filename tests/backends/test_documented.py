"""The example backend in the documentation fulfils the contract."""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "write-a-backend.md"
SAMPLE = re.compile(r"^```python\n(# shop/.*?)^```$", re.MULTILINE | re.DOTALL)

module: Any = types.ModuleType("tests.backends.documented")
for code in SAMPLE.findall(PAGE.read_text()):
    exec(code, vars(module))

TestSqliteBackend = module.TestSqliteBackend
