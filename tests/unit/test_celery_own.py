"""What the comparison with Celery's own tests counts as a difference."""

from __future__ import annotations

import pytest

from tests.celery_own.__main__ import report
from tests.celery_own.explained import explanation

ACTIVE = "t/integration/test_inspect.py::test_Inspect::test_active"
OTHER = "t/integration/test_tasks.py::test_tasks::test_basic_task"


@pytest.mark.parametrize(
    ("plain", "ours", "status"),
    [
        ({OTHER: "passed"}, {OTHER: "passed"}, 0),
        ({OTHER: "passed"}, {OTHER: "failed"}, 1),
        ({OTHER: "passed"}, {}, 1),
        ({OTHER: "passed", ACTIVE: "passed"}, {OTHER: "passed", ACTIVE: "failed"}, 0),
        ({OTHER: "passed", ACTIVE: "failed"}, {OTHER: "passed", ACTIVE: "failed"}, 0),
        # If nothing passes, nothing is compared.
        ({OTHER: "error"}, {OTHER: "error"}, 1),
    ],
)
def test_tests_that_pass_without_the_package_must_pass_or_be_explained(plain, ours, status):
    assert report({"plain": plain, "lock": ours}) == status


def test_an_explanation_that_is_not_needed_any_more_is_reported(capsys):
    report({"plain": {ACTIVE: "passed"}, "lock": {ACTIVE: "passed"}})
    assert "passes, though it is explained why not" in capsys.readouterr().out


def test_an_explanation_belongs_to_one_test():
    assert explanation("lock", ACTIVE)
    assert not explanation("lock", ACTIVE + "_queues")
