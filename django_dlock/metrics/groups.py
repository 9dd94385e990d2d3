"""Groups of lock names, so that a metric has few labels although there may be countless names.

A group is written down by the project: it comes from a template in its code, or is listed in its
settings. So a site has the same groups in every process, and no more with each new process or name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from .. import tenancy
from ..keys.views import OF_VIEWS
from ..log import logger
from .config import LONGEST_GROUP

OTHER = "other"

# A colon within a field begins its format.
_BEFORE_THE_COLON = re.compile(r"((?:\{[^}]*\}|[^:{])+):")


def before_the_colon(name: str) -> str:
    """``order`` for ``order:42``; ``other`` for a name without a colon, which may be anything."""
    group, colon, _ = name.partition(":")
    return group if colon and group else OTHER


class Groups:
    """Finds the group of a name.

    The template that the name was made from decides; the text of a field may be a visitor's. Of
    any other name, only what is listed counts.

    Args:
        rule: The project's own, which decides about names from templates, too. If it raises, that
            is logged once, and the name counts as ``other``.
        listed: What the rule may return; without a rule, what may be before the colon.
    """

    def __init__(
        self, rule: Callable[[str], str] | None = None, listed: Collection[str] = ()
    ) -> None:
        self._rule = rule
        self._listed = {OTHER, OF_VIEWS.rstrip(":"), *listed}
        self._failed = self._missed = False

    def of(self, name: str, template: str = "") -> str:
        """The group of a lock; without the tenant, because there may be many.

        Args:
            template: Of its name, as it stands in the code; empty if there is none.
        """
        if template and self._rule is None:
            found = _BEFORE_THE_COLON.match(template)
            return found[1][:LONGEST_GROUP] if found else OTHER
        name = tenancy.split(name)[1]
        try:
            group = str((self._rule or before_the_colon)(name))
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception("DLOCK_METRICS['GROUP'] failed for lock %r", name, name=name)
            return OTHER
        if group in self._listed:
            return group
        if not self._missed:
            self._missed = True
            logger.info(
                "Metrics count lock %r as 'other', like all whose group, here %r, is not in "
                "DLOCK_METRICS['GROUPS']",
                name,
                group[:LONGEST_GROUP],
                name=name,
            )
        return OTHER
