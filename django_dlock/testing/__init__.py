"""For tests: a clock moved by hand, and the contract that every backend keeps.

A third-party backend is held to the contract by one class in its own tests::

    from django_dlock.testing import BackendContract

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend(AliasOptions(alias="mine", backend="path.to.MyBackend"))

Each test takes names of its own, so one server may serve all of them.
"""

from __future__ import annotations

from .clock import FakeClock
from .contract import BackendContract

__all__ = ["BackendContract", "FakeClock"]
