"""The parts of the page of lock statistics: numbers, pictures, and tables beside them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.utils.formats import date_format, number_format
from django.utils.safestring import SafeString
from django.utils.timezone import get_current_timezone
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..metrics import instruments
from ..metrics.instruments import DURATIONS
from ..models import LockStatistics
from ..signals import LONG_WAIT
from .base import breakable
from .counted_links import CountedLinks
from .figures import Distribution, Figures, Group
from .pictures import Line, Picture, Tick, bar, columns, lines

MOST_LISTED = 12
"""Rows of a table that ranks names or reasons; the others are added up."""


class Cell(NamedTuple):
    """One number of a table, and a bar where it has one.

    Attributes:
        url: The list of what is counted; empty if there is none.
        is_trouble: Whether the number is a problem.
    """

    text: str
    bar: SafeString | str = ""
    url: str = ""
    is_trouble: bool = False


class Table(NamedTuple):
    """A table beside a picture. The first cell of a row is its heading."""

    heads: Sequence[Any]
    rows: Sequence[tuple[str, Sequence[Cell]]]

    @property
    def shown(self) -> list[tuple[SafeString, Sequence[Cell]]]:
        return [(breakable(name), cells) for name, cells in self.rows]


class Card(NamedTuple):
    """One part of the page.

    Attributes:
        lead: A sentence about what there is to see.
        legend: Style and name of each line, if there are several.
        table: The same as the picture, in numbers.
        ranking: What is shown as a table only.
        links: Text and address of lists about it; without those that have no address.
    """

    title: Any
    lead: str
    picture: SafeString | str = ""
    legend: Sequence[tuple[str, Any]] = ()
    table: Table | None = None
    ranking: Table | None = None
    wide: bool = False
    links: Sequence[tuple[Any, str]] = ()

    @property
    def shown_links(self) -> list[tuple[Any, str]]:
        return [(text, url) for text, url in self.links if url]


# -- texts -----------------------------------------------------------------------------------


def span(seconds: float) -> str:
    """A duration in one unit, from milliseconds to hours."""
    if not seconds:
        return "0"
    for limit, unit, text in ((1, 0.001, _("%s ms")), (120, 1, _("%s s")), (3600, 60, _("%s min"))):
        if seconds < limit:
            return str(text) % amount(seconds / unit)
    return gettext("%s h") % amount(seconds / 3600)


def amount(value: float) -> str:
    """A number with at most two decimals below 10, one below 100, and none above."""
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    text = number_format(value, digits, force_grouping=True)
    return text.rstrip("0").rstrip(".,") if digits else text


def percent(share: float) -> str:
    if 0 < share < 0.01:
        return gettext("under 1 %")
    return f"{round(100 * share)} %"


def _words(label: str) -> str:
    return label.replace("_", " ")


def _local(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, get_current_timezone())


def clock_time(seconds: float) -> str:
    return f"{_local(seconds):%H:%M}"


def _label_of_time(figures: Figures, start: int) -> str:
    local = _local(start)
    if figures.range.key == "hour":
        return f"{local:%H:%M}"
    return f"{date_format(local, 'D j')} {local:%H:%M}"


def _ticks(figures: Figures) -> list[Tick]:
    """Where a quarter of an hour, a part of a day, or a day begins, in the user's time zone."""

    def part(start: int) -> tuple[Any, str]:
        local = _local(start)
        if figures.range.key == "hour":
            return (local.hour, local.minute // 15), f"{local:%H:%M}"
        if figures.range.key == "day":
            return (local.day, local.hour // 6), f"{local:%H:%M}"
        return local.day, date_format(local, "D j")

    parts = [part(start) for start in figures.starts]
    return [
        Tick((index + 0.5) / len(parts), text)
        for index, (key, text) in enumerate(parts)
        if index and key != parts[index - 1][0]
    ]


# -- the parts of the page -------------------------------------------------------------------


def cards(figures: Figures, links: CountedLinks) -> list[Card]:
    return [
        _levels(figures)._replace(
            links=[(_("Held now"), links.held_now()), (_("Who waits now"), links.waiting_now())]
        ),
        _durations(figures.waits, "waits", _("Waiting time"))._replace(
            links=_long_waits(figures, links)
        ),
        _durations(figures.holds, "holds", _("Holding time")),
        _losses(figures, links),
        _lateness(figures),
        _put_back(figures),
        _contention(figures),
    ]


_PERIODS = {
    LockStatistics.Period.MINUTE: _("a minute"),
    LockStatistics.Period.TEN_MINUTES: _("ten minutes"),
    LockStatistics.Period.HOUR: _("an hour"),
}


def _levels(figures: Figures) -> Card:
    held, waiting = figures.level(instruments.HELD), figures.level(instruments.WAITING)
    most = max((value for value in held if value is not None), default=0.0)
    lead = gettext("Averages over %(period)s: at most %(held)s held, %(waiting)s waiting.") % {
        "period": _PERIODS[figures.range.period],
        "held": amount(most),
        "waiting": amount(max((value for value in waiting if value is not None), default=0.0)),
    }
    picture = Picture("dlock-levels", gettext("Held and waiting"), lead, _ticks(figures), amount)
    rows = [
        (_label_of_time(figures, start), (Cell(amount(a)), Cell(amount(b))))
        for start, a, b in zip(figures.starts, held, waiting, strict=True)
        if a is not None and b is not None
    ]
    return Card(
        _("Held and waiting"),
        lead,
        lines(picture, [Line("1", held), Line("2", waiting)]),
        [("1", _("held")), ("2", _("waiting"))],
        Table([_("from"), _("held"), _("waiting")], rows),
    )


def _durations(found: Distribution, name: str, title: Any) -> Card:
    lead = (
        gettext("Half within %(half)s, 95 %% within %(most)s, the longest %(longest)s.")
        % {
            "half": span(found.within(0.5)),
            "most": span(found.within(0.95)),
            "longest": span(found.highest),
        }
        if found.count
        else gettext("None in this time.")
    )
    bounds = [gettext("up to %s") % span(bound) for bound in DURATIONS]
    names = [*bounds, gettext("over %s") % span(DURATIONS[-1])]
    # A bound is between two columns; every second one has room.
    ticks = [
        Tick((index + 1) / len(names), span(bound))
        for index, bound in enumerate(DURATIONS)
        if index % 2 == 0
    ]
    picture = Picture(f"dlock-{name}", str(title), lead, ticks, amount, whole=True)
    rows = [
        (text, (Cell(amount(count)),)) for text, count in zip(names, found.buckets, strict=True)
    ]
    if not found.count:
        return Card(title, lead)
    return Card(
        title,
        lead,
        columns(picture, found.buckets, names, "1"),
        table=Table([_("duration"), _("number")], rows),
    )


def _long_waits(figures: Figures, links: CountedLinks) -> list[tuple[str, str]]:
    """The waits that are lock events, too."""
    first = DURATIONS.index(LONG_WAIT) + 1
    number = sum(figures.waits.buckets[first:])
    text = gettext("%(number)s waited longer than %(time)s") % {
        "number": amount(number),
        "time": span(LONG_WAIT),
    }
    return [(text, links.long_waits())] if number else []


def _over_time(
    figures: Figures, picture: Picture, values: Sequence[float], style: str
) -> tuple[SafeString, Table]:
    names = [_label_of_time(figures, start) for start in figures.starts]
    shown = ((name, value) for name, value in zip(names, values, strict=True) if value)
    rows = [(name, (Cell(picture.show(value)),)) for name, value in shown]
    table = Table([_("from"), picture.title], rows)
    if not rows:
        return SafeString(), table
    return columns(picture._replace(ticks=_ticks(figures)), values, names, style), table


def _losses(figures: Figures, links: CountedLinks) -> Card:
    title = _("Losses")
    total = figures.total(instruments.LOSSES)
    lead = (
        ngettext("%s lock ended while held.", "%s locks ended while held.", total) % amount(total)
        if total
        else gettext("No lock ended while held.")
    )
    values = figures.sums(instruments.LOSSES)
    picture, table = _over_time(
        figures, Picture("dlock-losses", str(title), lead, (), amount, whole=True), values, "3"
    )
    found = figures.by_label(instruments.LOSSES)
    reasons = [(_words(label), number) for label, number in found]
    urls = {_words(label): links.losses(label) for label, _number in found}
    return Card(title, lead, picture, (), table, _ranking(_("reason"), reasons, "3", urls))


def _lateness(figures: Figures) -> Card:
    title = _("Renewal lateness")
    values = figures.longest(instruments.LATENESS)
    renewals = figures.total(instruments.RENEWALS)
    lead = (
        gettext("%(number)s renewals; the renewal thread woke at most %(late)s too late.")
        % {"number": amount(renewals), "late": span(max(values))}
        if renewals
        else gettext("No lock was renewed.")
    )
    picture, table = _over_time(
        figures, Picture("dlock-lateness", str(title), lead, (), span), values, "1"
    )
    doubts = figures.total(instruments.DOUBTS)
    if doubts:
        lead += " " + (
            ngettext(
                "%s lock was in doubt for a while.", "%s locks were in doubt for a while.", doubts
            )
            % amount(doubts)
        )
    return Card(title, lead, picture, (), table)


def _put_back(figures: Figures) -> Card:
    title = _("Requeued")
    counts = figures.by_group_and_label(instruments.REQUEUES)
    total = sum(count for _key, count in counts)
    parked = dict(figures.by_label(instruments.HOLDS)).get("parked", 0)
    lead = (
        ngettext(
            "%s delivery of a task was requeued.",
            "%s deliveries of tasks were requeued.",
            total,
        )
        % amount(total)
        if total
        else gettext("No task was requeued.")
    )
    if parked:
        lead += " " + (
            ngettext("%s lock was kept for a retry.", "%s locks were kept for retries.", parked)
            % amount(parked)
        )
    values = figures.sums(instruments.REQUEUES)
    picture, table = _over_time(
        figures, Picture("dlock-requeues", str(title), lead, (), amount, whole=True), values, "1"
    )
    ranked = [(f"{task} · {_words(reason)}", count) for (task, reason), count in counts]
    return Card(title, lead, picture, (), table, _ranking(_("task and reason"), ranked, "1"))


def _ranking(
    head: Any,
    counts: Sequence[tuple[str, int]],
    style: str,
    urls: Mapping[str, str] | None = None,
) -> Table | None:
    if not counts:
        return None
    listed, others = list(counts[:MOST_LISTED]), counts[MOST_LISTED:]
    if others:
        listed.append((gettext("others"), sum(count for _text, count in others)))
    most, urls = max(count for _text, count in listed), urls or {}
    rows = [
        (text, (Cell(amount(count), bar(count / most, style), urls.get(text, "")),))
        for text, count in listed
    ]
    return Table([head, _("number")], rows)


def _contention(figures: Figures) -> Card:
    groups = figures.groups()
    contended = [group for group in groups if group.contended]
    lead = (
        gettext("Most often contended: %s.") % contended[0].name
        if contended
        else gettext("No acquire was contended.")
    )
    listed, others = groups[:MOST_LISTED], groups[MOST_LISTED:]
    several = len({group.alias for group in groups}) > 1
    rows = [
        (f"{group.alias} · {group.name}" if several else group.name, _cells(group))
        for group in listed
    ]
    if others:
        rows.append(_rest(others))
    heads = [
        _("names"),
        _("contended"),
        _("share"),
        _("acquired"),
        _("not acquired"),
        _("lost"),
        _("mean wait"),
        _("longest wait"),
    ]
    return Card(_("Contention by name"), lead, ranking=Table(heads, rows), wide=True)


def _cells(group: Group) -> Sequence[Cell]:
    return (
        Cell(amount(group.contended)),
        Cell(percent(group.share), bar(group.share, "1")),
        Cell(amount(group.acquired)),
        Cell(amount(group.gave_up)),
        Cell(amount(group.lost), is_trouble=bool(group.lost)),
        Cell(span(group.mean)),
        Cell(span(group.longest)),
    )


def _rest(groups: Sequence[Group]) -> tuple[str, Sequence[Cell]]:
    together = Group(
        "",
        "",
        sum(group.acquired for group in groups),
        sum(group.contended for group in groups),
        sum(group.gave_up for group in groups),
        sum(group.lost for group in groups),
        sum(group.waited for group in groups),
        max(group.longest for group in groups),
    )
    text = ngettext("%s other", "%s others", len(groups)) % len(groups)
    return text, _cells(together)
