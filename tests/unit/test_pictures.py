"""The pictures of the page of lock statistics, as SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from django_dlock.admin import pictures
from django_dlock.admin.pictures import HEIGHT, WIDTH, Line, Picture, Tick, bar, columns, lines

SVG = "{http://www.w3.org/2000/svg}"
AWKWARD = "<script>alert('1')</script> & \"🔒\" עברית"


def picture(**values):
    given = {
        "id": "p",
        "title": "Title",
        "description": "What there is to see",
        "ticks": [Tick(0.5, "12:00")],
        "show": "{:g}".format,
        **values,
    }
    return Picture(**given)


def parsed(svg):
    """The elements of the picture, without their name space."""
    return ET.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def labels(svg):
    return [each.text for each in parsed(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("highest", "whole", "expected"),
    [
        (0, True, ["0", "1"]),
        (1, True, ["0", "1"]),
        (3, True, ["0", "1", "2", "3"]),
        (1, False, ["0", "0.5", "1"]),
        (7, True, ["0", "2", "4", "6", "8"]),
        (0.3, False, ["0", "0.1", "0.2", "0.3"]),
        (97, True, ["0", "50", "100"]),
        (1234567, True, ["0", "500000", "1e+06", "1.5e+06"]),
        (float("inf"), False, ["0", "0.5", "1"]),
    ],
)
def test_the_axis_has_few_round_numbers(highest, whole, expected):
    scale = pictures._Scale(highest, whole)
    found = [f"{number * scale.step:g}" for number in range(scale.steps + 1)]
    assert found == expected


def test_every_part_is_inside_of_the_picture():
    values = [0, 1, 5.5, 1e9, None, 3]
    svg = lines(picture(), [Line("1", values), Line("2", values[::-1])])
    points = re.findall(r"([\d.]+),([\d.]+)", svg)
    assert points
    assert all(0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT for x, y in points)
    for each in parsed(columns(picture(), [0, 7, 1e12], ["a", "b", "c"], "1")).iter(f"{SVG}rect"):
        x, y, width, height = (float(each.get(name)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + width <= WIDTH
        assert 0 <= y <= y + height <= HEIGHT


def test_a_higher_value_is_higher_up():
    (line,) = parsed(lines(picture(), [Line("1", [0.0, 5.0, 10.0])])).iter(f"{SVG}polyline")
    heights = [float(point.split(",")[1]) for point in line.get("points").split()]
    assert heights == sorted(heights, reverse=True)
    assert len(set(heights)) == 3


def test_a_small_column_can_be_seen_and_0_has_no_column():
    svg = parsed(columns(picture(), [0, 1, 1_000_000], ["none", "one", "many"], "3"))
    rects = list(svg.iter(f"{SVG}rect"))
    assert [rect.find(f"{SVG}title").text for rect in rects] == ["one: 1", "many: 1e+06"]
    assert all(float(rect.get("height")) >= 1.5 for rect in rects)
    assert {rect.get("class") for rect in rects} == {"dlock-column-3"}


@pytest.mark.parametrize("values", [[], [None, None], [0.0]])
def test_without_values_there_is_an_empty_picture(values):
    assert labels(lines(picture(), [Line("1", values)]))[:1] == ["0"]
    assert list(parsed(columns(picture(), [], [], "1")).iter(f"{SVG}rect")) == []


def test_a_picture_is_described_for_those_who_cannot_see_it():
    svg = parsed(columns(picture(), [1], ["a"], "1"))
    assert svg.get("role") == "img"
    told = [svg.find(f".//*[@id='{name}']").text for name in svg.get("aria-labelledby").split()]
    assert told == ["Title", "What there is to see"]


def test_texts_are_escaped():
    values = picture(title=AWKWARD, description=AWKWARD, ticks=[Tick(0.5, AWKWARD)])
    for svg in (
        columns(values, [1], [AWKWARD], "1"),
        lines(values._replace(show=lambda value: AWKWARD), [Line("1", [1.0])]),
    ):
        assert "<script>" not in svg
        assert AWKWARD in labels(svg)
        assert parsed(svg).find(f"{SVG}title").text == AWKWARD


def test_a_strict_policy_allows_the_pictures():
    for svg in (
        columns(picture(), [1, 2], ["a", "b"], "1"),
        lines(picture(), [Line("1", [1.0, 2.0])]),
        bar(0.5, "2"),
    ):
        assert "style=" not in svg
        assert " on" not in re.sub(r">[^<]*<", "><", svg)
        assert "href" not in svg


@pytest.mark.parametrize(
    ("share", "width"), [(0.5, "50"), (0, "0"), (-1, "0"), (3, "100"), (1 / 3, "33.33")]
)
def test_a_bar_is_as_wide_as_its_share(share, width):
    ground, filled = parsed(bar(share, "2")).iter(f"{SVG}rect")
    assert (ground.get("width"), filled.get("width")) == ("100", width)


def test_numbers_are_written_as_svg_expects_them(settings):
    settings.LANGUAGE_CODE = "de"
    settings.USE_THOUSAND_SEPARATOR = True
    svg = lines(picture(), [Line("1", [0.5, 0.25])])
    # A comma stands between two numbers only.
    assert not re.search(r"\d,\d+,\d", svg)
