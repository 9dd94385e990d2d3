"""Names and keys: which ones are refused, and which ones are equal."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import inspect
import json
import uuid
import zoneinfo
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.test import override_settings

from django_dlock import keyed_digest
from django_dlock.keys import ALL_ARGUMENTS, KeySpec, MissingValue, compile_key
from django_dlock.keys.digests import fingerprint
from django_dlock.text.names import MAX_KEY, check_name

UUID = uuid.UUID("12345678123456781234567812345678")
WHAT = "the key of the test"


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    SMALL = 1


def rebuild(account_id: Any, full: Any = False, *, since: Any = None) -> None: ...


def open_ended(first: Any, *rest: Any, **options: Any) -> None: ...


def key_of(
    spec: KeySpec,
    *args: Any,
    function: Callable[..., Any] = rebuild,
    normalise: Callable[[Any], Any] = lambda value: value,
    **kwargs: Any,
) -> str:
    signature = inspect.signature(function)
    key = compile_key(spec, signature, what=WHAT, prefix="shop.rebuild", normalise=normalise)
    return key(args, kwargs)


# -- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "invoice:42", "Käse 🧀", " ", "ü" * 255])
def test_a_name_of_1_to_255_characters_is_used_unchanged(name: str) -> None:
    assert check_name(name) is name


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "a\x00", "\x7f", "\x85", "\ud800"])
def test_a_bad_name_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="A lock's name must"):
        check_name(name)


def test_a_name_that_is_no_string_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="not 42"):
        check_name(42)  # type: ignore[arg-type]


# -- templates -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x y", "x y"),
        (1, "1"),
        (-1, "-1"),
        (0, "0"),
        (UUID, str(UUID)),
        (dt.date(2026, 1, 2), "2026-01-02"),
        (dt.datetime(2026, 1, 2, 3, 4, tzinfo=dt.timezone.utc), "2026-01-02T03:04:00+00:00"),
        (Colour.RED, "red"),
        (Size.SMALL, "1"),
    ],
)
def test_a_template_renders_plain_values_as_plain_text(value: object, text: str) -> None:
    assert key_of("order:{account_id}", value) == f"order:{text}"


@pytest.mark.parametrize(
    "value",
    [None, "", True, 1.5, decimal.Decimal(1), b"x", [1], {}, object(), dt.timedelta(1)],
)
def test_a_template_refuses_what_has_no_plain_text(value: object) -> None:
    with pytest.raises(TypeError, match=r"the key of the test: the field \{account_id\}"):
        key_of("order:{account_id}", value)


def test_the_key_of_an_anonymous_user_is_a_type_error_that_says_so() -> None:
    def checkout(request: Any) -> None: ...

    request = SimpleNamespace(user=SimpleNamespace(pk=None))
    with pytest.raises(TypeError, match=r"\{request.user.pk\}.* is None \(an anonymous user"):
        key_of("checkout:{request.user.pk}", request, function=checkout)


def test_only_the_key_of_a_user_speaks_of_anonymous_users() -> None:
    with pytest.raises(TypeError, match="is None: everybody without a value"):
        key_of("order:{account_id}", None)


@pytest.mark.parametrize("template", ["order:{{account_id}}", "{{account_id}}", "a:%(account_id)s"])
def test_a_template_whose_only_field_is_text_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"the same for all calls.*write \{account_id\}"):
        key_of(template, 7)


@pytest.mark.parametrize(
    ("template", "key"),
    [
        # The tag of a Redis Cluster; a field beside the text; no argument of the function.
        ("{{orders}}:{account_id}", "{orders}:7"),
        ("{{account_id}}:{account_id}", "{account_id}:7"),
        ("{{orders}}", "{orders}"),
        ("report", "report"),
    ],
)
def test_a_template_may_have_braces_as_text(template: str, key: str) -> None:
    assert key_of(template, 7) == key


def test_a_template_can_use_attributes_and_indexes() -> None:
    user = SimpleNamespace(pk=7, tags=["a", {"x": "y"}])
    assert key_of("{account_id.pk}:{account_id.tags[1][x]}", user) == "7:y"


@pytest.mark.parametrize("field", ["account_id.nope", "account_id[3]", "account_id[x]"])
def test_a_field_that_cannot_be_looked_up_is_named(field: str) -> None:
    with pytest.raises(TypeError, match="cannot be looked up"):
        key_of(f"{{{field}}}", ["a"])


def test_a_template_takes_format_specs() -> None:
    day = dt.date(2026, 3, 1)
    assert key_of("{account_id:06d}:{since:%Y-%m}", 42, since=day) == "000042:2026-03"
    with pytest.raises(TypeError, match="of type str: Unknown format code"):
        key_of("{account_id:06d}", "x")


def test_a_template_is_the_same_for_positions_keywords_and_defaults() -> None:
    def named(account_id: int, kind: str = "daily") -> None: ...

    keys = [
        key_of("{account_id}-{kind}", 1, function=named),
        key_of("{account_id}-{kind}", 1, "daily", function=named),
        key_of("{account_id}-{kind}", kind="daily", account_id=1, function=named),
    ]
    assert keys == ["1-daily"] * 3


def test_a_template_can_use_the_values_of_starred_parameters() -> None:
    assert key_of("{rest[0]}:{number}", 1, "a", number=3, function=open_ended) == "a:3"
    with pytest.raises(TypeError, match="cannot be looked up"):
        key_of("{number}", 1, function=open_ended)


def test_a_template_without_a_field_is_one_key_for_all_calls() -> None:
    assert key_of("nightly", 1) == key_of("nightly", 2) == "nightly"
    assert key_of("{{nightly}}", 1) == "{nightly}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("", "it is empty"),
        ("{}", "has no name"),
        ("{0}", "has no name"),
        ("{.pk}", "has no name"),
        ("{account id}", "does not begin with an argument's name"),
        ("{account_id", "expected '}'"),
        ("account_id}", "Single '}'"),
        ("{account_id!r}", "!r is not allowed"),
        ("{account_id:{full}}", "cannot contain a field"),
        ("a\n{account_id}", "control characters"),
        ("{account_id}{full}", "text between the field 'full' and the one before"),
    ],
)
def test_a_malformed_template_is_refused_before_any_call(template: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        compile_key(template, inspect.signature(rebuild), what=WHAT)
    assert WHAT in str(refused.value)


@pytest.mark.parametrize("spec", ["{acount_id.pk}", ["acount_id"]])
def test_an_unknown_argument_is_refused_with_the_known_ones(spec: KeySpec) -> None:
    with pytest.raises(ValueError, match=r"'acount_id'.*known arguments: account_id, full, since"):
        compile_key(spec, inspect.signature(rebuild), what=WHAT)


def test_a_call_that_does_not_fit_the_signature_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="the key of the test: missing a required argument"):
        key_of("{account_id}")


def test_a_long_key_ends_in_a_digest() -> None:
    longest, longer, other = "x" * MAX_KEY, "x" * (MAX_KEY + 1), "x" * MAX_KEY + "y"
    assert key_of("{account_id}", longest) == longest
    keys = {key_of("{account_id}", longer), key_of("{account_id}", other)}
    assert [len(key) for key in keys] == [MAX_KEY, MAX_KEY]
    assert all(key.startswith("x" * 100) for key in keys)
    assert len(key_of(lambda *_: longer, 1)) == MAX_KEY


@pytest.mark.parametrize("value", ["a\nb", "a\x00b", "a\ud800b"])
def test_a_key_with_characters_that_a_name_cannot_have_ends_in_a_digest(value: str) -> None:
    name = key_of("order:{account_id}", value)
    assert check_name(name).startswith("order:a?b~")
    assert name != key_of("order:{account_id}", "a\tb")


# -- secrets -------------------------------------------------------------------------------


def of_request(
    request: Any, session_key: str = "", headers: Any = None, token: str = "", secret: str = ""
) -> None: ...


SECRETS = [
    *("session_key", "request.session.session_key", "request._request.session.session_key"),
    *("request.session._session_key", "request.session._SessionBase__session_key"),
    *("request.session.cache_key", "request.session[_auth_user_hash]"),
    *("request.COOKIES[sessionid]", "request.COOKIES.get", "request.COOKIES[language]"),
    *("request.scope[cookies][sessionid]", "request.scope[session].session_key"),
    *("request.META[HTTP_COOKIE]", "request.environ[HTTP_COOKIE]", "request.headers[Cookie]"),
    *("request.META[HTTP_AUTHORIZATION]", "request.META[HTTP_PROXY_AUTHORIZATION]"),
    *("request.headers[Authorization]", "request.headers[authorization]", "headers[AUTHORIZATION]"),
    *("request._request.headers[Authorization]", "request.headers._store[authorization][1]"),
    *("request.__dict__[META][HTTP_COOKIE]", "request.__dict__[COOKIES][sessionid]"),
    *("request.META[CSRF_COOKIE]", "request.META[HTTP_X_CSRFTOKEN]", "request.session[_csrftoken]"),
    *("request.headers[x-xsrf-token]", "request.headers[X-CSRFToken]"),
    *("request.POST[csrfmiddlewaretoken]", "request.headers[X-Session-Id]"),
    *("request.headers[X-Api-Key]", "request.META[HTTP_X_API_KEY]"),
    *("request.headers[X-Auth-Token]", "request.headers[X-Auth]", "request.META[HTTP_X_AUTH_KEY]"),
    *("request.headers._store[x-auth][1]", "request.headers[X-Amz-Access-Key]"),
    *("request.headers[Cf-Access-Jwt-Assertion]", "request.headers[X-Client-Secret]"),
    *("request.POST[password]", "request.data[new_password1]", "request.user.password"),
    *("request.auth", "request.auth.key", "request.auth.pk", "request.user.auth_token.key"),
    *("request._auth", "request._auth.key", "request._request._auth"),
    # A link of "Reset your password" has one in its path.
    *("token", "secret", "request.resolver_match.kwargs[token]", "request.user.reset_token"),
    *("request.GET[token]", "request.query_params[access_token]", "request.data[refreshToken]"),
    *("request.GET[api_key]", "request.GET[apikey]", "request.POST[client_secret]"),
    *("request.user.api_key", "request.data[jwt]", "request.GET[sessionid]"),
    *("request.session[access_token]", "request.session._session_cache[secret_key]"),
    *("request.headers[X-Amzn-Oidc-Data]", "request.META[HTTP_X_AMZN_OIDC_DATA]"),
]


@pytest.mark.parametrize("field", SECRETS)
def test_a_field_that_is_a_secret_is_refused_before_any_call(field: str) -> None:
    template = f"cart:{{{field}}}"
    with pytest.raises(ValueError, match=r"shown to operators.*keyed_digest") as refused:
        compile_key(template, inspect.signature(of_request), what=WHAT)
    assert f"{WHAT}: the template {template!r}: the field {{{field}}} is " in str(refused.value)


@pytest.mark.parametrize(
    "field",
    [
        *("request.user.pk", "request.session[cart]", "request.session[_auth_user_id]"),
        *("request.headers[Idempotency-Key]", "request.headers[X-Account]", "request.path"),
        *("request.META[REMOTE_ADDR]", "request.headers[X-Auth-Request-User]", "request.method"),
        *("request.POST[order_key]", "request.auth[user_id]", "request.auth.user_id"),
        *("request.order.authorization.pk", "request.user.cookies", "request.session_id"),
        *("request.POST[form_token]", "request.GET[page_token]", "request.user.tokens_left"),
        *("request.secretary.pk", "request.user.token_count", "request.POST[key]"),
    ],
)
def test_a_field_that_is_no_secret_is_accepted(field: str) -> None:
    compile_key(f"cart:{{{field}}}", inspect.signature(of_request), what=WHAT)


@pytest.mark.parametrize("field", ["request.META", "request.headers", "request.body"])
def test_the_error_of_a_template_does_not_show_what_it_cannot_render(field: str) -> None:
    request = HttpRequest()
    request.META["HTTP_COOKIE"] = "sessionid=opensesame"
    request._body = b"opensesame"
    with pytest.raises(TypeError, match="a template renders str, int") as refused:
        key_of(f"cart:{{{field}}}", request, function=of_request)
    assert "opensesame" not in str(refused.value)


def test_the_error_of_a_callable_does_not_show_what_it_returned() -> None:
    with pytest.raises(TypeError, match="returned a value of type bytes") as refused:
        key_of(lambda *args: b"opensesame", None)
    assert "opensesame" not in str(refused.value)


def test_a_secret_may_be_one_of_the_arguments_of_a_digest() -> None:
    key = key_of(["session_key"], None, "of the session", function=of_request)
    assert "of the session" not in key


@pytest.mark.parametrize(
    "value", ["x y", "Käse \ud800", 0, UUID, dt.date(2026, 1, 2), Colour.RED, Size.SMALL]
)
def test_a_keyed_digest_has_32_hexadecimal_digits(value: Any) -> None:
    digest = keyed_digest(value)
    assert (len(digest), int(digest, 16) > 0) == (32, True)
    assert keyed_digest(value) == digest


def test_a_keyed_digest_reads_a_value_as_a_template_does() -> None:
    assert len({keyed_digest(value) for value in ["1", "2", "red", str(UUID)]}) == 4
    assert keyed_digest(1) == keyed_digest("1") == keyed_digest(Size.SMALL)
    assert keyed_digest(UUID) == keyed_digest(str(UUID))
    assert keyed_digest(dt.date(2026, 1, 2)) == keyed_digest("2026-01-02")


def test_a_keyed_digest_never_changes_between_releases() -> None:
    # With a changed value, two processes of different releases could hold one lock.
    with override_settings(SECRET_KEY="secret"):
        assert keyed_digest("value") == "fbda1a43be443f93eac21d2b423b49ec"


def test_a_keyed_digest_cannot_be_made_without_the_secret_key() -> None:
    digest = keyed_digest("1")
    with override_settings(SECRET_KEY="another", SECRET_KEY_FALLBACKS=["of the tests"]):
        assert keyed_digest("1") != digest
    with override_settings(SECRET_KEY=""), pytest.raises(ImproperlyConfigured):
        keyed_digest("1")


@pytest.mark.parametrize("value", [None, ""])
def test_a_keyed_digest_of_no_value_is_a_missing_value(value: Any) -> None:
    with pytest.raises(MissingValue, match="everybody without a value would share this key"):
        keyed_digest(value)


@pytest.mark.parametrize("value", [True, 1.5, b"opensesame", ["opensesame"], object()])
def test_the_error_of_a_keyed_digest_does_not_show_the_value(value: Any) -> None:
    with pytest.raises(TypeError, match="keyed_digest") as refused:
        keyed_digest(value)
    assert type(value).__name__ in str(refused.value)
    assert "opensesame" not in str(refused.value)


# -- digests -------------------------------------------------------------------------------


def test_a_digest_begins_with_its_prefix_and_version() -> None:
    prefix, version, digest = key_of(ALL_ARGUMENTS, 1).split(":")
    assert (prefix, version, len(digest)) == ("shop.rebuild", "v1", 32)


def test_a_digest_never_changes_between_releases() -> None:
    # With a changed value, two workers of different releases could work on one key.
    digest = fingerprint({"b": ["x", None], "a": 1}, what=WHAT)
    assert digest == "v1:043c33c0e4540a5f4c0f83e8dbedad14"


def test_positions_keywords_and_defaults_give_the_same_digest() -> None:
    keys = {
        key_of(ALL_ARGUMENTS, 1),
        key_of(ALL_ARGUMENTS, account_id=1),
        key_of(ALL_ARGUMENTS, 1, False),
        key_of(ALL_ARGUMENTS, full=False, account_id=1, since=None),
    }
    assert len(keys) == 1


def test_a_new_optional_parameter_changes_no_digest() -> None:
    def newer(account_id: int, full: bool = False, *, since: Any = None, deep: int = 3) -> None: ...

    assert key_of(ALL_ARGUMENTS, 1, full=True) == key_of(
        ALL_ARGUMENTS, 1, full=True, function=newer
    )


def test_a_value_that_merely_equals_the_default_is_not_the_default() -> None:
    assert key_of(ALL_ARGUMENTS, 1, 0) != key_of(ALL_ARGUMENTS, 1, False)


DISTINCT = [
    1,
    "1",
    1.0,
    True,
    None,
    "",
    "None",
    b"1",
    decimal.Decimal(1),
    [1],
    ["1"],
    [[1]],
    [1, 2],
    [2, 1],
    {1},
    {"1": 1},
    {1: 1},
    {"a": [1]},
    [],
    {},
    dt.date(2026, 1, 1),
    dt.datetime(2026, 1, 1),  # noqa: DTZ001 - naive on purpose
    dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
    dt.time(1),
    dt.timedelta(seconds=1),
    UUID,
    str(UUID),
]


def test_values_of_different_types_and_structures_give_different_digests() -> None:
    assert len({key_of(ALL_ARGUMENTS, value) for value in DISTINCT}) == len(DISTINCT)


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")

SAME = [
    ((1, 2), [1, 2]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1, 2, 3}, frozenset([3, 2, 1])),
    (Colour.RED, "red"),
    (Size.SMALL, 1),
    (b"x", bytearray(b"x")),
    (
        dt.datetime(2026, 1, 1, 12, tzinfo=dt.timezone.utc),
        dt.datetime(2026, 1, 1, 13, tzinfo=BERLIN),
    ),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_values_that_a_serializer_makes_equal_give_the_same_digest(
    one: object, other: object
) -> None:
    assert key_of(ALL_ARGUMENTS, one) == key_of(ALL_ARGUMENTS, other)


def test_a_list_of_names_leaves_the_other_arguments_out() -> None:
    assert key_of(["account_id"], 1, True) == key_of(["account_id"], 1)
    assert key_of(["account_id"], 1) != key_of(["account_id"], 2)
    assert key_of(["account_id", "full"], 1, True) == key_of(["full", "account_id"], 1, True)


def test_starred_arguments_are_part_of_the_digest() -> None:
    def key(*args: Any, **kwargs: Any) -> str:
        return key_of(ALL_ARGUMENTS, *args, function=open_ended, **kwargs)

    assert len({key(1), key(1, 2), key(1, 3), key(1, x=2), key(1, x=3), key(1, y=2)}) == 6
    assert key(1, a=1, b=2) == key(1, b=2, a=1)
    assert key_of(["x"], 1, x=2, function=open_ended) != key_of(["x"], 1, function=open_ended)


def test_arguments_are_digested_as_a_worker_receives_them() -> None:
    def listed(items: Any, order: Any = (1, 2)) -> None: ...

    def key(*args: Any) -> str:
        def through_json(value: Any) -> Any:
            return json.loads(json.dumps(value))

        return key_of(ALL_ARGUMENTS, *args, function=listed, normalise=through_json)

    assert key({1: "a"}) == key({"1": "a"}) == key({"1": "a"}, [1, 2])


class Thing:
    """Has no stable form: its repr contains a memory address."""


thing = Thing()


@pytest.mark.parametrize("value", [Thing(), [Thing()], {"a": Thing()}, len, range(3)])
def test_the_error_for_an_argument_without_a_stable_form_names_it_and_a_solution(
    value: object,
) -> None:
    with pytest.raises(TypeError, match=r"the argument 'account_id' contains .*primary key"):
        key_of(ALL_ARGUMENTS, value)


def test_a_default_without_a_stable_form_is_accepted() -> None:
    def function(name: str, marker: Any = thing) -> None: ...

    assert key_of(ALL_ARGUMENTS, "a", function=function) != key_of(
        ALL_ARGUMENTS, "a", 1, function=function
    )


def test_an_empty_list_of_names_is_refused() -> None:
    with pytest.raises(ValueError, match="empty list"):
        key_of([], 1)


# -- callables -----------------------------------------------------------------------------


def test_a_callable_key_gets_the_arguments_as_passed() -> None:
    assert key_of(lambda *args, **kwargs: f"{args}{kwargs}", 1, full=2) == "(1,){'full': 2}"


@pytest.mark.parametrize("answer", [None, "", 1, b"x"])
def test_a_callable_key_must_return_a_string(answer: Any) -> None:
    with pytest.raises(TypeError, match="not a non-empty string"):
        key_of(lambda account_id: answer, 1)


def test_a_coroutine_function_cannot_be_a_key() -> None:
    async def key(account_id: int) -> str:
        return str(account_id)

    with pytest.raises(TypeError, match="coroutine function"):
        key_of(key, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [None, 7, [1], {"a": 1}])
def test_other_types_of_keys_are_refused(spec: Any) -> None:
    with pytest.raises(TypeError, match="it takes a template"):
        key_of(spec, 1)


@pytest.mark.parametrize(
    "call",
    [((1, 2), {}), ((1,), {}), ((1,), {"b": 2}), ((), {"a": 1, "b": 2}), ((), {"b": 2, "a": 1})],
    ids=str,
)
@pytest.mark.parametrize(
    "function",
    [
        lambda a, b=2: None,
        lambda a, b=2, /: None,
        lambda a, *, b=2: None,
        lambda a, b=2, *more: None,
        lambda a, b=2, **more: None,
    ],
    ids=["by place", "by place alone", "by name", "more", "more by name"],
)
def test_a_key_is_the_same_however_an_argument_is_passed(function, call):
    args, kwargs = call
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            key_of("{a}:{b}", *args, function=function, **kwargs)
    else:
        assert key_of("{a}:{b}", *args, function=function, **kwargs) == "1:2"
