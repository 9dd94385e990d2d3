"""Fixtures for the tests of the backends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import redis_calls


@pytest.fixture(autouse=True)
def backends_are_closed() -> Iterator[None]:
    """Close all backends, so that the garbage collector does not finalize an open socket first."""
    yield
    while redis_calls.MADE:
        redis_calls.MADE.pop().close()
