"""Tables with characters that take two columns of a terminal, or none."""

from __future__ import annotations

import re

import pytest

from django_dlock.management.cells import first, last, room
from django_dlock.management.columns import Column, aligned, cut_host, cut_middle, cut_task
from django_dlock.management.wrapping import wrapped

WIDE, ACCENTS = "注文処理" * 8, "e\u0301" * 40


def test_the_room_that_a_text_takes() -> None:
    assert [room(text) for text in ("", "abc", "日本", "e\u0301", "a\u200db", "ｱ", "\u00e9")] == [
        *(0, 3, 4, 1, 2, 1, 1)
    ]


@pytest.mark.parametrize("text", ["abcdefgh", WIDE, ACCENTS, "a日b本c語"])
def test_a_part_fits_and_is_as_long_as_possible(text: str) -> None:
    for size in range(12):
        for part in (first(text, size), last(text, size)):
            assert room(part) <= size
            assert room(part) >= min(size, room(text)) - 1
        assert text.startswith(first(text, size))
        assert text.endswith(last(text, size))


def test_no_accent_loses_its_letter() -> None:
    assert last("xe\u0301", 1) == "e\u0301"
    assert first("e\u0301x", 1) == "e\u0301"
    assert first("ab", 0) == last("ab", 0) == ""


@pytest.mark.parametrize("shorten", [cut_middle, cut_host, cut_task])
@pytest.mark.parametrize("text", [WIDE, ACCENTS, f"{WIDE}:4711", f"{WIDE}[{WIDE}]", f"/{WIDE}"])
@pytest.mark.parametrize("width", [24, 30, 41])
def test_the_columns_stay_aligned(shorten, text: str, width: int) -> None:
    columns = [Column("NAME", [text, "short"], shorten), Column("STATE", ["alive", "dead"])]
    _head, *rows = aligned(columns, width, "utf-8")
    assert all(room(row) <= width for row in rows)
    assert len({room(re.split("alive|dead", row)[0]) for row in rows}) == 1


def test_wrapped_lines_count_columns() -> None:
    assert [*wrapped("日本 語語 ab", 7)] == ["日本", "語語 ab"]
