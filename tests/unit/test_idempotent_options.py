"""The options and the template tag of ``idempotent_view``, without a request."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse
from django.template import Context, Template

from django_dlock import BodyField, idempotent_view
from django_dlock.templatetags.dlock import idempotency_key


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key": BodyField(), "header": "X-Id"}, "takes one of them"),
        ({"key": "idempotency_key"}, r"use BodyField\('idempotency_key'\)"),
        ({"key": BodyField}, "an instance such as BodyField"),
        ({"key": 7}, "key of @idempotent_view is 7"),
        ({"key": ""}, "a template without a field"),
        ({"key": "{"}, "the template '{'"),
        ({"key": []}, "is an empty list"),
        ({"key": "{request.session.session_key}"}, "the key of a session"),
        ({"key": ["request.COOKIES"]}, "a cookie"),
        ({"header": "Authorization"}, "a header with credentials"),
        ({"header": "X Id"}, "letters, digits and hyphens"),
        ({"header": ""}, "letters, digits and hyphens"),
        ({"payload": "amount"}, "payload of @idempotent_view is 'amount'"),
        ({"payload": [7]}, "payload of @idempotent_view"),
        ({"payload": 7}, "payload of @idempotent_view"),
        ({"if_contended": "queue"}, "'reject' or 'wait'"),
        ({"if_contended": "wait", "wait": 0}, "needs a wait"),
        ({"if_contended": "wait", "wait": -1}, "wait is -1"),
        ({"done_if": "redirects"}, "'redirect' or a callable"),
        ({"done_if": "redirect"}, "whose key is not a header"),
        ({"done_if": 302}, "'redirect' or a plain function"),
    ],
)
def test_wrong_options_are_refused_at_decoration(options: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        idempotent_view(**options)


def test_a_key_that_names_no_argument_of_the_view_is_refused_at_decoration() -> None:
    def view(request: HttpRequest, number: int) -> HttpResponse:
        return HttpResponse()

    with pytest.raises(ValueError, match=r"key of @idempotent_view on .*view: .*'nubmer'"):
        idempotent_view(key="{nubmer}")(view)


@pytest.mark.parametrize("name", ["password", "access_token", "csrfmiddlewaretoken"])
def test_a_field_that_is_a_secret_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="shown to operators"):
        BodyField(name)
    with pytest.raises((TypeError, ValueError)):
        BodyField("")


def test_the_tag_makes_a_hidden_field_of_any_name() -> None:
    page = Template("{% load dlock %}{% idempotency_key name %}").render(
        Context({"name": 'order"'})
    )
    assert re.fullmatch(r'<input type="hidden" name="order&quot;" value="\w{32}">', page)


def test_the_tag_is_a_function_for_jinja() -> None:
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(autoescape=True)
    environment.globals["idempotency_key"] = idempotency_key
    page = environment.from_string("{{ idempotency_key() }}").render()
    assert page.startswith('<input type="hidden" name="idempotency_key" value="')
