"""Groups of lock names, so that a metric has few labels although there may be countless names."""

from __future__ import annotations

from collections.abc import Callable

from ..log import logger

__all__ = ["MOST", "OTHER", "Groups", "before_the_colon"]

MOST = 100
"""Groups of one process; further ones are counted together."""
OTHER = "other"
LONGEST = 64


def before_the_colon(name: str) -> str:
    """``order`` for ``order:42``; ``other`` for a name without a colon, which may be anything."""
    group, colon, _ = name.partition(":")
    return group if colon and group else OTHER


class Groups:
    """Finds the group of a name.

    Args:
        rule: The project's own. If it raises, that is logged once, and the name counts as
            ``other``.
    """

    def __init__(self, rule: Callable[[str], str] | None = None) -> None:
        self._rule = rule or before_the_colon
        self._known: set[str] = {OTHER}
        self._failed = False

    def of(self, name: str) -> str:
        try:
            group = str(self._rule(name))[:LONGEST] or OTHER
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception("DLOCK_METRICS['GROUP'] failed for lock %r", name, name=name)
            return OTHER
        if group not in self._known:
            if len(self._known) > MOST:
                return OTHER
            self._known.add(group)
        return group
