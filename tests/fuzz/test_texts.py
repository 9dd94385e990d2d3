"""Texts that operators read: no control character, no password, and only a few groups of names."""

from __future__ import annotations

import logging
import re
import unicodedata
from typing import Any
from urllib.parse import quote

from django.test import override_settings
from django.utils.html import escape
from hypothesis import assume, example, given
from hypothesis import strategies as some

from django_dlock import LockNotAcquired
from django_dlock.admin.base import breakable, lines, long_text
from django_dlock.celery import owners
from django_dlock.log import logger
from django_dlock.metrics.groups import OTHER, Groups
from django_dlock.operators.task_url import url_of_task
from django_dlock.text.names import MAX_KEY, check_name, fit
from django_dlock.text.printable import printable
from django_dlock.text.redaction import HIDDEN, redacted
from django_dlock.text.request_path import MAX_PATH, cut
from tests.support.fuzzing import examples, json_values, texts

UNSAFE = {"Cc", "Cs", "Zl", "Zp", "Cf", "Co", "Cn"}
JOINERS = "\u200c\u200d"


def is_safe(text: str, keep: str = "") -> bool:
    """Whether a terminal, a log and a page show each character where it is."""
    return all(
        char in keep or char in JOINERS or unicodedata.category(char) not in UNSAFE for char in text
    )


@examples(150)
@given(texts(60))
@example("\x1b[31m\u202e\r\n\ud800")
def test_printable_leaves_nothing_that_moves_or_hides_text(text: str) -> None:
    shown = printable(text)
    assert is_safe(shown)
    assert printable(shown) == shown
    assert is_safe(printable(text, keep="\n"), keep="\n")
    assert printable(text, keep="\n").count("\n") == text.count("\n")


@examples(100)
@given(texts(40))
def test_printable_can_be_read_back(text: str) -> None:
    assume("\\" not in text)
    shown = printable(text)
    for char in dict.fromkeys(text):
        shown = shown.replace(repr(char)[1:-1], char) if printable(char) != char else shown
    assert shown == text


@examples(100)
@given(texts(60))
@example("<script>alert(1)</script>")
@example("'\"><img src=x onerror=y>")
def test_every_cell_of_the_admin_escapes_its_text(text: str) -> None:
    for shown in (breakable(text), lines(text), long_text(text)):
        assert is_safe(shown, keep="\n")
        inner = shown
        for tag in ("<bdi>", "</bdi>", "<wbr>", "<div>", "</div>", "</pre>"):
            inner = inner.replace(tag, "")
        for tag in ('<div class="dlock-lines">', '<pre class="dlock-facts dlock-long">'):
            inner = inner.replace(tag, "")
        assert inner == escape(printable(text, keep="\n" if "<pre" in shown else ""))


@examples(100)
@given(texts(60), texts(60))
def test_a_line_of_the_log_is_one_line_and_its_fields_are_exact(name: str, path: str) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    target = logging.getLogger("django_dlock")
    target.addHandler(handler)
    try:
        error = LockNotAcquired("held", name, "default", holder=path)
        logger.warning("%s %r: %s", path, name, error, name=name)
    finally:
        target.removeHandler(handler)
    assert is_safe(records[0].getMessage())
    assert is_safe(str(error))
    assert vars(records[0])["lock_name"] == name


# -- credentials ---------------------------------------------------------------------------

SECRET = "S3cr3t"
around = some.text(some.sampled_from("ab/:@?#%&=+!~ ,;'\"\\[]é\u202e"), max_size=6)
schemes = some.sampled_from(["redis", "rediss", "unix", "postgres", "http", "sentinel", ""])
names = some.sampled_from(["password", "pwd", "PASSWORD", "auth_token", "api_key", "secret"])


def address(scheme: str, user: str, password: str, rest: str) -> str:
    return f"{scheme}://{user}:{password}@{rest}" if scheme else f"{user}:{password}@{rest}"


@examples(150)
@given(schemes, around, some.tuples(around, around), some.booleans(), around)
@example("redis", "", ("", ""), False, "h:6379/0")
@example("", "user", ("", ""), False, "zk1:2181,zk2:2181")
def test_the_password_of_an_address_is_never_shown(
    scheme: str, user: str, parts: tuple[str, str], encoded: bool, rest: str
) -> None:
    password = SECRET.join(parts)
    text = address(scheme, user, quote(password, safe="") if encoded else password, rest)
    for value in (text, text.encode(), [text], (text, 1), {"LOCATION": text}, {text: 1}, [[text]]):
        shown = redacted(value)
        assert SECRET not in shown
        assert HIDDEN in shown


@examples(150)
@given(schemes, names, around, around, some.sampled_from("&?;,"))
@example("redis", "password", "", "", "?")
@example("redis", "password", "a b", "", "?")
def test_the_password_in_a_parameter_is_never_shown(
    scheme: str, name: str, before: str, after: str, mark: str
) -> None:
    text = f"{scheme}://h:1/0{mark}{name}={quote(before, safe='')}{SECRET}{quote(after, safe='')}"
    assert SECRET not in redacted(text)
    assert SECRET not in redacted([text.encode()])
    assert SECRET not in redacted({name: before + SECRET + after})
    assert SECRET not in redacted({"a": [{name.encode(): {"b": SECRET}}]})


@examples(100)
@given(json_values())
def test_settings_of_any_type_can_be_told(value: Any) -> None:
    assert isinstance(redacted(value), str)


# -- names, paths, groups, owners ----------------------------------------------------------


@examples(100)
@given(texts(300, at_least=1))
@example("a" * MAX_KEY)
@example("a" * (MAX_KEY + 1))
@example("\x00")
def test_any_text_becomes_a_valid_name(text: str) -> None:
    made = fit(text)
    assert check_name(made) == made
    assert len(made) <= MAX_KEY
    assert fit(made) == made


@examples(100)
@given(texts(30), some.integers(0, 3))
def test_a_path_has_a_longest_form(text: str, times: int) -> None:
    path = text * (times * 40)
    kept = cut(path)
    assert len(kept) <= MAX_PATH
    assert kept == path or (kept[-1] == "…" and path.startswith(kept[:-1]))


@examples(20)
@given(some.lists(texts(80), max_size=20), some.sampled_from([None, len, str.upper]))
def test_visitors_cannot_make_more_groups_than_there_may_be(given_names: Any, rule: Any) -> None:
    groups = Groups(rule, ["order"])
    found = {groups.of(f"{number}{name}:1") for number, name in enumerate(given_names)}
    assert found <= {OTHER}


@examples(100)
@given(json_values(), some.integers(1, 9), some.integers(1, 9))
def test_an_owner_is_made_for_any_id(task_id: Any, pid: int, number: int) -> None:
    first = owners.new(task_id)
    assert is_safe(first)
    child = owners.in_child(first, pid)
    assert owners.is_of(child, task_id)
    assert owners.is_of_delivery(owners.again(child, number), child)
    assert not owners.is_of_delivery(owners.again(child, number), first)


@examples(100)
@given(json_values(), texts(60))
def test_any_owner_is_read(task_id: Any, owner: str) -> None:
    assert owners.is_of(owner, task_id) in (True, False, None)
    assert owners.is_of_delivery(owner, owners.new(None)) is False


@examples(100)
@given(texts(40))
@example("javascript:alert(1)")
@example("../../x")
@example("\ud800")
def test_the_link_to_a_task_leads_to_the_site_that_the_settings_name(task_id: str) -> None:
    begin = "https://flower.example/task/"
    with override_settings(DLOCK_ADMIN={"TASK_URL": f"{begin}{{task_id}}"}):
        found = url_of_task(task_id)
    is_text = not any("\ud800" <= char <= "\udfff" for char in task_id)
    assert bool(found) == bool(task_id and is_text)
    assert not found or re.fullmatch(r"[\w.~%-]*", found.removeprefix(begin), re.ASCII)
