"""Keys: no two calls with different arguments share one, and nothing but a refusal is raised."""

from __future__ import annotations

import datetime as dt
import inspect
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as some

from django_dlock.keys import ALL_ARGUMENTS, compile_key, keyed_digest
from django_dlock.keys.digests import fingerprint
from django_dlock.text.names import MAX_KEY, check_name
from tests.support.fuzzing import examples, json_values, texts

REFUSALS = (TypeError, ValueError)


def call(number: Any, *rest: Any, way: Any = None, **others: Any) -> None:
    """Has every kind of parameter that a key can name."""


SIGNATURE = inspect.signature(call)

zones = some.sampled_from([None, dt.timezone.utc, dt.timezone(dt.timedelta(hours=14))])
AT_THE_END = dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-14)))
AT_THE_BEGINNING = dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=14)))
plain = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(),
    some.floats(),
    texts(20),
    some.binary(max_size=8),
    some.decimals(allow_nan=False),
    some.uuids(),
    some.dates(),
    some.times(),
    some.timedeltas(),
    some.datetimes(timezones=zones),
    some.sampled_from([AT_THE_END, AT_THE_BEGINNING, 10**400, object(), ...]),
    # Longer than Python writes in digits; made late, because Hypothesis would write it.
    some.just(10).map(lambda base: base**5000),
)
values = some.recursive(
    plain,
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.lists(inner, max_size=3).map(tuple)
        | some.frozensets(plain, max_size=3)
        | some.dictionaries(plain, inner, max_size=3)
    ),
    max_leaves=8,
)


def canonical(value: Any) -> Any:
    """An independent form: equal for values that mean the same argument, and for no others."""
    if isinstance(value, list | tuple):
        return ("list", tuple(map(canonical, value)))
    if isinstance(value, set | frozenset):
        return ("set", frozenset(map(canonical, value)))
    if isinstance(value, Mapping):
        return ("map", frozenset((canonical(k), canonical(v)) for k, v in value.items()))
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else (math.copysign(1, value), value))
    return (type(value).__name__, str(value) if value is not None else None)


json_like = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | texts(6),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(texts(3), inner, max_size=3),
    max_leaves=6,
)


@examples(100)
@given(json_like, json_like)
@example(1, "1")
@example(1, True)
@example(1, 1.0)
@example(0.0, -0.0)
@example(None, "None")
@example(["a", "b"], ["a,b"])
@example([["a"], "b"], [["a", "b"]])
@example({"a": 1, "b": 2}, {"b": 2, "a": 1})
@example({"a": [1]}, [["a", [1]]])
@example("\ud800", "\udfff")
@example({}, [])
def test_two_arguments_share_a_digest_only_if_they_are_the_same(one: Any, other: Any) -> None:
    made = [fingerprint({"a": value}, what="key") for value in (one, other)]
    assert (made[0] == made[1]) == (canonical(one) == canonical(other))


@examples(100)
@given(some.dictionaries(some.text(max_size=3), json_like, max_size=4), some.randoms())
def test_the_order_of_arguments_does_not_matter_and_their_names_do(
    arguments: dict[str, Any], random: Any
) -> None:
    items = list(arguments.items())
    random.shuffle(items)
    assert fingerprint(arguments, what="key") == fingerprint(dict(items), what="key")
    renamed = {f"{name}_": value for name, value in items}
    assert not items or fingerprint(arguments, what="key") != fingerprint(renamed, what="key")


@examples(100)
@given(values)
@example(AT_THE_END)
@example(AT_THE_BEGINNING)
def test_no_value_raises_more_than_a_refusal(value: Any) -> None:
    for names in (ALL_ARGUMENTS, ["number"], ["way", "rest", "more"]):
        key = compile_key(names, SIGNATURE, what="key", prefix="task")
        for args, kwargs in (((value,), {}), ((1, value), {"way": value, "more": value})):
            try:
                made = key(args, kwargs)
            except REFUSALS:
                continue
            assert check_name(made) == made


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    value: Any = []
    for _ in range(2_000):
        value = [value]
    for names in (ALL_ARGUMENTS, ["way"]):
        key = compile_key(names, SIGNATURE, what="key")
        with pytest.raises(TypeError, match="'way' is nested too deeply"):
            key((1,), {"way": value})


@examples(50)
@given(some.datetimes(timezones=zones), zones)
@example(AT_THE_END, dt.timezone.utc)
def test_the_same_time_in_another_zone_is_the_same_argument(when: Any, zone: Any) -> None:
    assume(when.tzinfo is not None and zone is not None)
    try:
        moved = when.astimezone(zone)
    except OverflowError:
        # No year that Python knows, there; a key is made all the same.
        assert fingerprint({"a": when}, what="key")
        return
    assert fingerprint({"a": when}, what="key") == fingerprint({"a": moved}, what="key")


@examples(100)
@given(texts(40), values)
@example("{number}", "a")
@example("{number:>300}", "a")
@example("{number.__class__}", "a")
@example("{number.__class__.__mro__[1].__subclasses__}", "a")
@example("{rest[0]}:{way!r}", "a")
@example("{number[x", "a")
@example("{number:{way}}", "a")
def test_a_template_is_refused_or_makes_a_valid_name(template: str, value: Any) -> None:
    try:
        key = compile_key(template, SIGNATURE, what="key")
        made = key((value,), {})
    except REFUSALS:
        return
    assert check_name(made) == made
    assert len(made) <= MAX_KEY


specs = some.sampled_from(["", ":", ":>20", ":x", ":.3", ":%Y-%m", ":,", ":99999", ":_", ":\x00"])
fields = some.sampled_from(["number", "number.year", "number[0]", "rest[0]", "others", "way"])


@examples(100)
@given(some.lists(some.tuples(texts(5), fields, specs), min_size=1, max_size=3), values)
def test_a_template_with_fields_is_refused_or_makes_a_valid_name(parts: Any, value: Any) -> None:
    template = "".join(f"{text}{{{field}{spec}}}" for text, field, spec in parts)
    test_a_template_is_refused_or_makes_a_valid_name.hypothesis.inner_test(template, value)


@examples(100)
@given(texts(300), texts(300))
@example("a" * 201, "a" * 202)
@example("a\n", "a?")
@example("a\ud800", "a\udfff")
def test_two_texts_of_a_callable_share_a_name_only_if_they_are_the_same(
    one: str, other: str
) -> None:
    key = compile_key(lambda number: number, SIGNATURE, what="key")
    assume(one and other)
    assert (key((one,), {}) == key((other,), {})) == (one == other)


@examples(100)
@given(values, values)
@example("a", "b")
@example("\ud800", "\udfff")
def test_a_keyed_digest_shows_nothing_and_keeps_values_apart(one: Any, other: Any) -> None:
    try:
        made = [keyed_digest(value) for value in (one, other)]
    except REFUSALS:
        return
    for digest in made:
        assert len(digest) == 32
        assert int(digest, 16) >= 0
    if isinstance(one, str) and isinstance(other, str):
        assert (made[0] == made[1]) == (one == other)


@examples(100)
@given(json_values())
def test_what_a_callable_returns_is_a_name_or_refused(value: Any) -> None:
    key = compile_key(lambda number: number, SIGNATURE, what="key")
    if isinstance(value, str) and value:
        made = key((value,), {})
        assert check_name(made) == made
        return
    with pytest.raises(TypeError) as refusal:
        key((value,), {})
    # It is logged, so it does not contain what may be private.
    assert len(str(refusal.value)) < 300


def test_a_list_of_names_that_no_call_has_is_refused() -> None:
    signature = inspect.signature(lambda number: None)
    with pytest.raises(ValueError, match="'nothing'"):
        compile_key(["nothing"], signature, what="key")
