"""A pytest plugin: the fixture ``local_locks``.

Add this to the ``conftest.py`` at the root of your tests::

    pytest_plugins = ["django_dlock.testing.pytest"]
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..handler import LockHandler, locks
from . import local

__all__ = ["local_locks"]


@pytest.fixture
def local_locks() -> Iterator[LockHandler]:
    """Keep all locks in this process, and release what the test leaves held.

    The value is ``locks``, to see what is held: ``local_locks["default"].list()``.
    """
    with local.local_locks():
        yield locks
