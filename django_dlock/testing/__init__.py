"""For tests: locks without a server, a fake clock, and the contract of backends.

``local_locks`` keeps the locks of a project's tests in their process; it is also a fixture of
the pytest plugin ``django_dlock.testing.pytest``.

The tests of a third-party backend need one class to check the contract::

    from django_dlock.testing import BackendContract

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend(AliasOptions(alias="mine", backend="path.to.MyBackend"))

Each test uses new names, so all of them can use one server.
"""

from __future__ import annotations

from .clock import FakeClock
from .contract import BackendContract
from .local import local_locks

__all__ = ["BackendContract", "FakeClock", "local_locks"]
