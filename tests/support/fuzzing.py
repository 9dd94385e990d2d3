"""How long Hypothesis looks, and the values that it makes of what strangers write."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as some

TIMES = int(os.environ.get("DLOCK_FUZZ", "1"))
"""How many times as many examples as in ``make test``; ``make fuzz`` sets it."""


def examples(count: int) -> settings:
    """The decorator of a test with so many examples, the same ones in each run of ``make test``.

    A longer run makes other ones each time, and prints how to repeat the one that fails.
    """
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        # A busy machine fails no test.
        deadline=None,
        # Nothing is left behind in the checkout.
        database=None,
        print_blob=TIMES > 1,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


DANGEROUS = (
    # What moves a cursor, begins a line, turns the direction, or cannot be encoded;
    "\x00\x07\x08\t\n\r\x1b\x7f\x85\x9b\u061c\u200b\u200e\u202e\u2028\u2066\ufeff\U000e0041"
    "\ud800\udfff"
    # what ends a value in HTML, JSON, SQL, Lua, a URL or a header; and what all texts have.
    "<>\"'&\\%/:;,{}[]?#=@+*_~ ab1é\u0301ß🦊"
)


def texts(longest: int = 300, *, at_least: int = 0) -> some.SearchStrategy[str]:
    """Any text, one half of them of dangerous characters; lone surrogates included."""
    return some.one_of(
        some.text(some.sampled_from(DANGEROUS), min_size=at_least, max_size=longest),
        some.text(some.characters(codec=None), min_size=at_least, max_size=longest),
    )


def json_values() -> some.SearchStrategy[Any]:
    """All that ``json.loads`` may return."""
    scalars = (
        *(some.none(), some.booleans(), some.integers(), some.floats(), texts(20)),
        some.sampled_from([10**400, -(10**400), 2**63, 2**31, -1]),
    )
    return some.recursive(
        some.one_of(*scalars),
        lambda inner: (
            some.lists(inner, max_size=4) | some.dictionaries(texts(8), inner, max_size=4)
        ),
        max_leaves=12,
    )
