"""Pictures of a result, as SVG, each for light and for dark pages; needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .beds import BEDS
from .model import OURS, Result, RowResult
from .parsers import PYTHON
from .report import amount
from .rows.cycle import row_name
from .rows.scale import OPERATIONS, SIZES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Theme:
    """Colours that are readable on furo's background, which shows through.

    Attributes:
        others: Distinguishable with any colour vision (Okabe and Ito), in this order.
    """

    name: str
    text: str
    faint: str
    ours: str
    floor: str
    peer: str
    others: tuple[str, ...]


THEMES = (
    Theme(
        "light",
        text="#24292f",
        faint="#d0d7de",
        ours="#0b6e4f",
        floor="#57606a",
        peer="#a9b8c6",
        others=("#0072b2", "#d55e00", "#a8518a", "#8a6d00", "#3d7ea6", "#444444"),
    ),
    Theme(
        "dark",
        text="#dfe5ec",
        faint="#3a424c",
        ours="#4fd1a5",
        floor="#9aa6b2",
        peer="#5b6b7b",
        others=("#56b4e9", "#ff9255", "#e39ac6", "#f0d040", "#8fb8d8", "#cccccc"),
    ),
)

MARKERS = "osD^vPX*"
WIDTH = 5.2
"""Inches. A phone shrinks it to two thirds, and the text must stay readable."""

STYLE = {
    "font.family": "sans-serif",
    # Drawn with the first font, the widest one; shown with whatever font the reader has.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Segoe UI", "Helvetica Neue", "Arial"],
    "font.size": 11.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    # Otherwise each drawing has new ids, and differs although nothing has changed.
    "svg.hashsalt": "django-dlock",
}


# -- bars -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One subject of a row: its ratio to the floor, and the range of the ratio."""

    name: str
    role: str
    value: float
    low: float
    high: float


def _bars(row: RowResult, metric: str) -> list[Bar]:
    floor = row.metric(metric).floor
    bars = []
    for name, subject in row.subjects.items():
        compared = row.compared(name, metric)
        if compared is not None and name != floor:
            spread = compared.spread
            bars.append(
                Bar(name, subject.role, spread.median, spread.low_quartile, spread.high_quartile)
            )
    return sorted(bars, key=lambda bar: bar.value, reverse=True)


def _draw_bars(axes: Axes, theme: Theme, bars: Sequence[Bar], floor: str) -> None:
    wide = max(bar.value for bar in bars) > 15
    if wide:
        axes.set_xscale("log")
    places = range(len(bars))
    axes.barh(
        places,
        [bar.value for bar in bars],
        color=[theme.ours if bar.role == "ours" else theme.peer for bar in bars],
        height=0.62,
        left=0,
    )
    axes.errorbar(
        [bar.value for bar in bars],
        places,
        xerr=[[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]],
        fmt="none",
        ecolor=theme.text,
        elinewidth=1,
        capsize=2,
    )
    longest = max(1.0, *(bar.high for bar in bars))
    for place, bar in zip(places, bars, strict=True):
        told = f"{bar.value:.0f} ×" if bar.value >= 20 else f"{bar.value:.2f} ×"
        # Also right of the floor's line, which would otherwise cross the text.
        end = max(bar.high, 1.0)
        gap = end * 1.12 if wide else end + longest * 0.02
        weight = "bold" if bar.role == "ours" else "normal"
        axes.text(gap, place, told, va="center", color=theme.text, weight=weight)
    axes.set_yticks(places, [bar.name.replace(", ", ",\n") for bar in bars])
    for label, bar in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if bar.role == "ours" else "normal")
    axes.axvline(1, color=theme.floor, linewidth=1.2, linestyle="--")
    if wide:
        axes.xaxis.set_major_formatter(lambda value, _at: f"{value:g}")
        axes.set_xlim(min(0.7, min(bar.low for bar in bars) * 0.8), longest * 6)
    else:
        axes.set_xlim(0, longest * 1.22)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x", color=theme.faint, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"times as long as {floor} (dashed)")


def _bars_of(*panels: tuple[str, str, str]) -> Drawing:
    """Each panel: the row, its metric, and a title."""

    def draw(result: Result, theme: Theme, figure: Figures) -> None:
        found = [
            (title, row, metric, _bars(row, metric))
            for name, metric, title in panels
            if (row := result.rows.get(name)) is not None
        ]
        heights = [1.0 + 0.4 * len(bars) for _, _, _, bars in found]
        all_axes = figure(sum(heights) + 0.2, heights)
        for axes, (title, row, metric, bars) in zip(all_axes, found, strict=True):
            _draw_bars(axes, theme, bars, str(row.metric(metric).floor))
            axes.set_title(title, loc="left", color=theme.text, size=12)

    return draw


# -- beds -----------------------------------------------------------------------------------

TICKS = (0.5, 0.7, 1, 1.5, 2, 3, 4, 6)
CYCLES = tuple(row_name(bed, "same", PYTHON) for bed in BEDS)


def _cycle(result: Result, theme: Theme, figure: Figures) -> None:
    """A mark for each subject on each bed."""
    rows = [result.rows[name] for name in CYCLES]
    names = [name for name, about in rows[0].subjects.items() if about.role != "floor"]
    all_axes = figure(7.0, [2.7, 2.7])
    panels = (("latency", "latency"), ("cpu", "processor time of client and server"))
    for axes, (metric, title) in zip(all_axes, panels, strict=True):
        others = iter(zip(theme.others, MARKERS[1:], strict=False))
        for name in names:
            ours = name == OURS
            colour, marker = (theme.ours, MARKERS[0]) if ours else next(others)
            found = [(row.compared(name, metric), place) for place, row in enumerate(rows)]
            xs = [series.spread.median for series, _ in found if series is not None]
            ys = [place for series, place in found if series is not None]
            size = 9 if ours else 6
            axes.plot(xs, ys, marker, color=colour, markersize=size, label=name, zorder=2 + ours)
        axes.set_xscale("log")
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.set_xticks([], minor=True)
        beds = [BEDS[row.bed].title.replace(", ", ",\n") for row in rows]
        axes.set_yticks(range(len(rows)), beds)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.axvline(1, color=theme.floor, linewidth=1.2, linestyle="--")
        axes.grid(visible=True, color=theme.faint, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left", color=theme.text, size=12)
    all_axes[-1].set_xlabel("two bare commands are 1 (dashed)")
    _legend(all_axes[-1], theme, left=-0.5, below=-0.28)


# -- curves ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Points of one subject, or of one operation."""

    name: str
    role: str
    points: tuple[tuple[float, float], ...]


def _family(result: Result, family: str, metric: str, *, ratio: bool) -> list[Curve]:
    rows = [row for row in result.rows.values() if row.family == family and row.x is not None]
    rows.sort(key=lambda row: row.x or 0)
    curves = []
    names = {name: about.role for row in rows for name, about in row.subjects.items()}
    for name, role in names.items():
        if ratio and role == "floor":
            continue
        points = []
        for row in rows:
            series = row.compared(name, metric) if ratio else row.series(name, metric)
            if series is not None and row.x is not None:
                points.append((row.x, series.spread.median))
        if points:
            curves.append(Curve(name, role, tuple(points)))
    return curves


def _draw_curves(axes: Axes, theme: Theme, curves: Sequence[Curve]) -> None:
    others = iter(zip(theme.others, MARKERS[1:], strict=False))
    for curve in curves:
        ours = curve.role == "ours"
        if ours:
            colour, marker = theme.ours, MARKERS[0]
        elif curve.role == "floor":
            colour, marker = theme.floor, ""
        else:
            colour, marker = next(others)
        xs, ys = zip(*curve.points, strict=True)
        axes.plot(
            xs,
            ys,
            label=curve.name,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=2.6 if ours else 1.5,
            linestyle="--" if curve.role == "floor" else "-",
            zorder=3 if ours else 2,
        )
    axes.grid(visible=True, color=theme.faint, linewidth=0.6)
    _legend(axes, theme)


def _legend(axes: Axes, theme: Theme, left: float = -0.02, below: float = -0.2) -> None:
    # Below, where no curve can cross it, and as wide as the phone's screen.
    legend = axes.legend(
        loc="upper left",
        bbox_to_anchor=(left, below),
        ncols=2,
        frameon=False,
        labelcolor=theme.text,
        fontsize=10.5,
        handlelength=1.6,
        columnspacing=1.2,
    )
    for text in legend.get_texts():
        text.set_fontweight("bold" if text.get_text() == OURS else "normal")


def _throughput(result: Result, theme: Theme, figure: Figures) -> None:
    (axes,) = figure(3.9, [3.9])
    _draw_curves(axes, theme, _family(result, "throughput", "throughput", ratio=True))
    axes.axhline(1, color=theme.floor, linewidth=1.2, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, None)
    xs = sorted({row.x for row in result.rows.values() if row.family == "throughput" and row.x})
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.set_xlabel("processes that want the name")
    axes.set_title(
        "throughput, of that of a BLPOP token (dashed)", loc="left", color=theme.text, size=11
    )


def _renewal(result: Result, theme: Theme, figure: Figures) -> None:
    (axes,) = figure(3.7, [3.7])
    _draw_curves(axes, theme, _family(result, "renewal", "cpu", ratio=False))
    axes.set_xscale("log")
    axes.set_yscale("log")
    _in_seconds(axes)
    _in_thousands(axes)
    axes.set_xlabel("leases that one process holds")
    axes.set_title(
        "processor time to renew all of them once", loc="left", color=theme.text, size=11
    )


DRAWN = ("acquire", "renew", "first_page", "other_order", "search", "get")
"""Drawn below the other curves."""


def _scale(result: Result, theme: Theme, figure: Figures) -> None:
    row = result.rows["scale"]
    subjects = [name for name, about in row.subjects.items() if about.role != "peer"]
    curves = []
    for metric in DRAWN:
        points = [
            (float(size), series.spread.median)
            for size, name in zip(SIZES, subjects, strict=True)
            if (series := row.series(name, metric)) is not None
        ]
        curves.append(
            Curve(OPERATIONS[metric], "ours" if metric == "acquire" else "peer", tuple(points))
        )
    (axes,) = figure(4.4, [4.4])
    _draw_curves(axes, theme, curves)
    axes.set_xscale("log")
    axes.set_yscale("log")
    _in_seconds(axes)
    _in_thousands(axes)
    axes.set_xlabel("locks held (at the last, a million other keys)")
    axes.set_title("what one operation takes", loc="left", color=theme.text, size=12)


def _in_seconds(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(lambda value, _at: amount(value, "s"))
    axes.yaxis.set_minor_formatter(lambda _value, _at: "")


def _in_thousands(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(lambda value, _at: f"{value:,.0f}".replace(",", " "))


# -- files ----------------------------------------------------------------------------------

Figures = Callable[[float, Sequence[float]], "list[Axes]"]
"""Creates axes below each other, with this total height and these parts, in inches."""
Drawing = Callable[[Result, Theme, Figures], None]

PICTURES: dict[str, tuple[tuple[str, ...], Drawing]] = {
    "cycle": (CYCLES, _cycle),
    "handover": (
        ("handover", "handover.slept"),
        _bars_of(
            ("handover", "latency", "two that take turns"),
            ("handover.slept", "latency", "the waiter has slept"),
        ),
    ),
    "throughput": (("throughput.1",), _throughput),
    "renewal": (("renewal.100",), _renewal),
    "task": (
        ("task",),
        _bars_of(("task", "run", "running a task"), ("task", "total", "publishing and running it")),
    ),
    "scale": (("scale",), _scale),
}
"""By name: the rows that it needs, and the function that draws it."""


def file_name(picture: str, theme: Theme) -> str:
    return f"speed-{picture}-{theme.name}.svg"


def draw(result: Result, directory: Path, source: str) -> list[Path]:
    """Draw all pictures whose rows exist.

    Args:
        source: The file's note on the origin of its numbers.

    Raises:
        ImportError: There is no matplotlib.
    """
    drawn = []
    for picture, (needs, drawing) in PICTURES.items():
        if not set(needs) <= set(result.rows):
            continue
        for theme in THEMES:
            path = directory / file_name(picture, theme)
            _save(drawing, result, theme, path, source)
            drawn.append(path)
    return drawn


def _save(drawing: Drawing, result: Result, theme: Theme, path: Path, source: str) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    colours = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.text
    )
    style: Any = {**STYLE, **colours, "axes.edgecolor": theme.faint}
    with mpl.rc_context(style):
        figure = Figure(layout=ConstrainedLayoutEngine(h_pad=0.1))

        def axes(height: float, parts: Sequence[float]) -> list[Axes]:
            figure.set_size_inches(WIDTH, height)
            made = figure.subplots(len(parts), 1, squeeze=False, height_ratios=parts)
            return list(made[:, 0])

        drawing(result, theme, axes)
        figure.savefig(
            path, format="svg", transparent=True, metadata={"Date": None, "Source": source}
        )
