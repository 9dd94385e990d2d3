"""Groups of lock names, so that a metric has few labels although there may be countless names."""

from __future__ import annotations

import re
from collections.abc import Callable

from .. import tenancy
from ..log import logger

__all__ = ["MOST", "OTHER", "Groups", "before_the_colon"]

MOST = 100
"""Groups of one process; further ones are counted together."""
OTHER = "other"
LONGEST = 64


# A colon within a field begins its format.
_BEFORE_THE_COLON = re.compile(r"((?:\{[^}]*\}|[^:{])+):")


def before_the_colon(name: str) -> str:
    """``order`` for ``order:42``; ``other`` for a name without a colon, which may be anything."""
    group, colon, _ = name.partition(":")
    return group if colon and group else OTHER


class Groups:
    """Finds the group of a name.

    Without a rule of the project, the template that the name was made from decides: the text of a
    field may be a visitor's, who could use up all groups.

    Args:
        rule: The project's own. If it raises, that is logged once, and the name counts as
            ``other``.
    """

    def __init__(self, rule: Callable[[str], str] | None = None) -> None:
        self._rule = rule
        self._known: set[str] = {OTHER}
        self._failed = False

    def of(self, name: str, template: str = "") -> str:
        """The group of a lock; without the tenant, because there may be many.

        Args:
            template: Of its name, as it stands in the code; empty if there is none.
        """
        name = tenancy.split(name)[1]
        try:
            group = self._group(name, template)[:LONGEST] or OTHER
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

    def _group(self, name: str, template: str) -> str:
        if self._rule is not None:
            return str(self._rule(name))
        if template:
            found = _BEFORE_THE_COLON.match(template)
            return found[1] if found else OTHER
        return before_the_colon(name)
