"""The numbers at the top of the page of lock statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..metrics import instruments
from .cards import amount, percent
from .counted_links import CountedLinks
from .figures import Figures


class Total(NamedTuple):
    """One number.

    Attributes:
        remarks: What there is to say of it: how much of it is normal.
        trouble: What of it is a problem; empty if nothing is.
        url: The lock events that are counted; empty if there are none.
        is_trouble: Whether the number itself is a problem.
    """

    name: Any
    number: str
    remarks: Sequence[str] = ()
    trouble: str = ""
    url: str = ""
    is_trouble: bool = False


def totals(figures: Figures, links: CountedLinks) -> list[Total]:
    contended = figures.total(instruments.CONTENTIONS)
    attempts = figures.waits.count + figures.total(instruments.ATTEMPTS)
    share = percent(min(1.0, contended / max(1, attempts)))
    lost = figures.total(instruments.LOSSES)
    return [
        Total(_("Acquired"), amount(figures.waits.count)),
        Total(_("Contended"), amount(contended), [share]),
        _not_acquired(figures),
        _requeued(figures),
        Total(_("Lost"), amount(lost), url=links.losses() if lost else "", is_trouble=bool(lost)),
    ]


def _not_acquired(figures: Figures) -> Total:
    number = figures.total(instruments.ATTEMPTS)
    requeued = figures.not_acquired_but_requeued
    remarks = [gettext("%s of them requeued") % amount(requeued)] if requeued else []
    unanswered = dict(figures.by_label(instruments.ATTEMPTS)).get("unavailable", 0)
    trouble = gettext("%s without an answer of the store") % amount(unanswered)
    return Total(_("Not acquired"), amount(number), remarks, trouble if unanswered else "")


def _requeued(figures: Figures) -> Total:
    found = figures.by_label(instruments.REQUEUES)
    others = sum(count for why, count in found if why not in instruments.ATTEMPTS.values)
    remarks = [gettext("tasks")]
    if figures.alias:
        remarks = [gettext("tasks of all aliases")]
    elif others:
        remarks = [gettext("tasks, %s for other reasons than a lock") % amount(others)]
    return Total(_("Requeued"), amount(figures.total(instruments.REQUEUES)), remarks)
