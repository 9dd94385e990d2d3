"""Small pictures as SVG, made on the server: lines, columns and bars.

Colours and sizes of text come from ``statistics.css``, so that a strict Content-Security-Policy
allows them, and suit light and dark themes. No picture depends on colour alone, and each has a
title and a description for those who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 6, 10, 24
"""Margins, with room for the labels of the axes."""
MOST_STEPS = 4
"""Lines of the grid above zero."""


class Tick(NamedTuple):
    """A label below the picture.

    Attributes:
        at: From 0 for the left end to 1 for the right one.
    """

    at: float
    text: str


class Picture(NamedTuple):
    """What all pictures have.

    Attributes:
        id: Unique on its page.
        title: What it shows.
        description: What there is to see in it, in a sentence.
        ticks: Labels below.
        show: Makes a text of a value.
        whole: Whether all values are whole numbers.
    """

    id: str
    title: str
    description: str
    ticks: Sequence[Tick]
    show: Callable[[float], str]
    whole: bool = False


class Line(NamedTuple):
    """One line of a picture.

    Attributes:
        style: The name of its colour and dashes in the style sheet.
        values: One for each point, from left to right; ``None`` where nothing is known.
    """

    style: str
    values: Sequence[float | None]


def lines(picture: Picture, drawn: Sequence[Line]) -> SafeString:
    """Lines from left to right, all with the same number of values."""
    scale = _Scale(
        max((v for line in drawn for v in line.values if v is not None), default=0.0), picture.whole
    )
    parts = []
    for line in drawn:
        count = len(line.values)
        points = [
            (_x((index + 0.5) / count), scale.y(value))
            for index, value in enumerate(line.values)
            if value is not None
        ]
        if points:
            parts.append(_line(line.style, points))
    return _svg(picture, scale, parts)


def columns(
    picture: Picture, values: Sequence[float], names: Sequence[str], style: str
) -> SafeString:
    """One column for each value, from left to right.

    Args:
        names: What each column is about; shown when the pointer is over it.
        style: The name of their colour in the style sheet.
    """
    scale = _Scale(max(values, default=0.0), picture.whole)
    width = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    gap = min(2.0, width * 0.2)
    parts = [
        format_html(
            '<rect class="dlock-column-{}" x="{}" y="{}" width="{}" height="{}">'
            "<title>{}: {}</title></rect>",
            style,
            _number(LEFT + index * width + gap / 2),
            # At least so high that any value above zero can be seen.
            _number(min(scale.y(value), scale.y(0) - 1.5)),
            _number(width - gap),
            _number(max(scale.y(0) - scale.y(value), 1.5)),
            names[index],
            picture.show(value),
        )
        for index, value in enumerate(values)
        if value
    ]
    return _svg(picture, scale, parts)


def bar(share: float, style: str) -> SafeString:
    """A bar beside its number in a table; ``share`` is from 0 to 1."""
    return format_html(
        '<svg class="dlock-share" viewBox="0 0 100 10" preserveAspectRatio="none" '
        'aria-hidden="true" focusable="false">'
        '<rect class="dlock-share-ground" width="100" height="10"/>'
        '<rect class="dlock-column-{}" width="{}" height="10"/></svg>',
        style,
        _number(100 * min(1.0, max(0.0, share))),
    )


class _Scale:
    """The vertical axis: from zero to a round number above the highest value."""

    def __init__(self, highest: float, whole: bool) -> None:
        if not 0 < highest < math.inf:
            highest = 1.0
        rough = highest / MOST_STEPS
        unit = 10.0 ** math.floor(math.log10(rough))
        factor = next(each for each in (1, 2, 5, 10) if unit * each >= rough * 0.999)
        self.step = max(1.0, unit * factor) if whole else unit * factor
        self.steps = math.ceil(highest / self.step - 1e-9)

    def y(self, value: float) -> float:
        share = value / (self.step * self.steps)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * share


def _number(value: float) -> str:
    # Not by Django's own formats, which may write a comma.
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _line(style: str, points: Sequence[tuple[float, float]]) -> SafeString:
    ground = HEIGHT - BOTTOM
    area = [(points[0][0], ground), *points, (points[-1][0], ground)]
    return format_html(
        '<polygon class="dlock-area-{}" points="{}"/><polyline class="dlock-line-{}" points="{}"/>',
        style,
        _points(area),
        style,
        _points(points),
    )


def _svg(picture: Picture, scale: _Scale, parts: Sequence[SafeString]) -> SafeString:
    return format_html(
        '<svg class="dlock-picture" viewBox="0 0 {} {}" role="img" focusable="false" '
        'aria-labelledby="{}-title {}-desc"><title id="{}-title">{}</title>'
        '<desc id="{}-desc">{}</desc>{}{}{}</svg>',
        WIDTH,
        HEIGHT,
        picture.id,
        picture.id,
        picture.id,
        picture.title,
        picture.id,
        picture.description,
        _grid(scale, picture.show),
        format_html_join("", "{}", ((part,) for part in parts)),
        _ticks(picture.ticks),
    )


def _grid(scale: _Scale, show: Callable[[float], str]) -> SafeString:
    def row(number: int) -> tuple[Any, ...]:
        value = number * scale.step
        y = _number(scale.y(value))
        return LEFT, WIDTH - RIGHT, y, y, LEFT - 6, _number(scale.y(value) + 4), show(value)

    return format_html_join(
        "",
        '<line class="dlock-grid" x1="{}" x2="{}" y1="{}" y2="{}"/>'
        '<text class="dlock-label" x="{}" y="{}" text-anchor="end">{}</text>',
        (row(number) for number in range(scale.steps + 1)),
    )


def _ticks(ticks: Sequence[Tick]) -> SafeString:
    return format_html_join(
        "",
        '<line class="dlock-tick" x1="{}" x2="{}" y1="{}" y2="{}"/>'
        '<text class="dlock-label" x="{}" y="{}" text-anchor="{}">{}</text>',
        (
            (
                *(_number(_x(tick.at)),) * 2,
                HEIGHT - BOTTOM,
                HEIGHT - BOTTOM + 4,
                _number(_x(tick.at)),
                HEIGHT - 6,
                # The last one would be cut off.
                "end" if tick.at > 0.95 else "middle",
                tick.text,
            )
            for tick in ticks
        ),
    )
