"""Fixtures of the tests of one backend after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import redis_calls


@pytest.fixture(autouse=True)
def backends_are_closed() -> Iterator[None]:
    """The garbage collector might finalize an open socket before its owner closes it."""
    yield
    while redis_calls.MADE:
        redis_calls.MADE.pop().close()
