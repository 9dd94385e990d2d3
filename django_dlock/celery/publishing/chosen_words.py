"""The words that a publisher has chosen for the arguments of a message.

``apply_async(..., argsrepr="('***',)", kwargsrepr="{}")`` hides the arguments in Celery's logs and
events. Without these options, Celery writes the arguments themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery.app.task import Context
from celery.utils.saferepr import saferepr

WORDS = ("argsrepr", "kwargsrepr")
MAX_WORDS = 1024
"""Characters of what Celery writes itself."""


def chosen_words(
    request: Context, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, str]:
    """Those of the two options that the publisher of the request has set; never raises.

    Celery's own words are recognised by the arguments; in doubt, for instance because a list was a
    tuple before, they count as chosen, which hides nothing.
    """
    known = vars(request)
    given = {name: known.get(name) for name in WORDS}
    chosen = {}
    for name, values in (("argsrepr", (tuple(args), list(args))), ("kwargsrepr", (dict(kwargs),))):
        words = given[name]
        if isinstance(words, str) and not any(_is_own(words, value) for value in values):
            chosen[name] = words
    return chosen


def _is_own(words: str, value: Any) -> bool:
    try:
        # Usually the two are the same, and ``repr`` takes a tenth of the time.
        return words == repr(value) or words == saferepr(value, MAX_WORDS)
    except Exception:  # noqa: BLE001 - whatever the types of arguments raise
        return False
