"""The contract of backends tells third parties why their store has to pass each of its tests."""

from __future__ import annotations

import pytest

from django_dlock.testing import BackendContract
from tests.support.contract_parts import each_command

TESTS = sorted(name for name in dir(BackendContract) if name.startswith("test_"))


@pytest.mark.parametrize("name", TESTS)
def test_each_test_of_the_contract_says_why_it_runs_on_every_store(name: str) -> None:
    says = getattr(BackendContract, name).__doc__ or ""
    assert says.startswith("On every store: "), "else it belongs where its outcome is decided"


def test_a_part_of_the_contract_leaves_the_whole_as_it_is() -> None:
    class Part(BackendContract):
        pass

    each_command(Part)
    left = {name for name in TESTS if getattr(Part, name)}
    assert left < set(TESTS)
    assert all(getattr(BackendContract, name) for name in TESTS)
