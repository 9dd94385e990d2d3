"""What a query string may filter our lists by, and what each permission alone lets you see."""

from __future__ import annotations

import datetime as dt
import json

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_dlock import locks
from django_dlock.lease import LeaseRequest
from django_dlock.models import FollowUp, HeldLock, IdempotencyRecord, LockEvent, LockStatistics

pytestmark = pytest.mark.django_db

SECRET, OPERATOR = "sesame", "grace"
ANSWER = "poppy"
"""In the result and in the text of the error."""

MODELS = (HeldLock, IdempotencyRecord, FollowUp, LockEvent, LockStatistics)

NAMED = {
    HeldLock: {"prefix", "host", "task", "alias", "kind", "holder_state", "older_than", "waiting"},
    IdempotencyRecord: {
        *("database", "scope", "state__exact", "state__isnull"),
        *("created_at__gte", "created_at__lt", "expires_at__gte", "expires_at__lt"),
    },
    FollowUp: {"database", "published"},
    LockEvent: {
        *("event__exact", "event__isnull", "alias", "alias__isnull", "name"),
        *("when__gte", "when__lt", "reason"),
    },
}
"""All that a list may be asked for by somebody who may only see it."""

LOOKUPS = (
    *("", "__exact", "__iexact", "__contains", "__icontains", "__startswith", "__endswith"),
    *("__regex", "__iregex", "__in", "__range", "__isnull", "__gt", "__gte", "__lt", "__lte"),
    *("__length", "__year", "__date", "__key__contains"),
)


@pytest.fixture(autouse=True)
def aliases(settings):
    settings.DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
    locks.reset()
    yield
    locks.reset()


@pytest.fixture
def objects():
    """One object of each model; private are arguments, results and the operator's name."""
    now = timezone.now()
    later = now + dt.timedelta(days=7)
    message = json.dumps({"args": [SECRET], "kwargs": {}})
    record = IdempotencyRecord.objects.create(
        digest=IdempotencyRecord.digest_of("shop.charge", "42"),
        scope="shop.charge",
        key="42",
        payload="v1:fingerprint",
        state="failed",
        attempt=1,
        lock_alias="default",
        lock_name="order:42",
        owner="owner",
        message=message,
        result=json.dumps({"body": ANSWER}),
        error=f"ValueError('no such colour: {ANSWER}')",
        created_at=now,
        started_at=now,
        expires_at=later,
    )
    follow_up = FollowUp.objects.create(
        record=record,
        task="shop.receipt",
        task_id="t",
        message=message,
        created_at=now,
        expires_at=later,
    )
    event = LockEvent.objects.create(
        when=now, event="broken", alias="default", name="order:42", user=OPERATOR
    )
    facts = {"user": OPERATOR, "path": "/pay/"}
    request = LeaseRequest("order:42", "owner", 30, metadata=json.dumps(facts))
    backend = locks["default"]
    backend.acquire(request, deadline=backend.call_deadline())
    return {
        HeldLock: "default/order:42",
        IdempotencyRecord: record.pk,
        FollowUp: follow_up.pk,
        LockEvent: event.pk,
        LockStatistics: "none",
    }


def visitor(*permissions):
    user = User.objects.create_user("visitor", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def list_of(model):
    return reverse(f"admin:django_dlock_{model._meta.model_name}_changelist")


def columns_of(model, *, relations=True):
    """Each column, also those of related objects."""
    for field in model._meta.get_fields():
        yield field.name
        if field.is_relation and relations:
            related = columns_of(field.related_model, relations=False)
            yield from (f"{field.name}__{name}" for name in related)


COLUMNS = [(model, name) for model in NAMED for name in ("pk", *columns_of(model))]


@pytest.mark.parametrize(
    ("model", "column"), COLUMNS, ids=[f"{model.__name__}-{name}" for model, name in COLUMNS]
)
def test_a_list_is_filtered_only_by_what_it_names(objects, model, column):
    client = visitor(f"view_{model._meta.model_name}")
    asked = {f"{column}{lookup}" for lookup in LOOKUPS} - NAMED[model]
    answers = {name: client.get(list_of(model), {name: "1"}).status_code for name in asked}
    assert answers == dict.fromkeys(asked, 400)


@pytest.mark.parametrize("model", NAMED)
def test_what_a_list_names_can_be_asked_for(objects, model):
    client = visitor(f"view_{model._meta.model_name}")
    at = "2020-01-01 00:00:00+00:00"
    values = {"isnull": "False", "gte": at, "lt": at, "older_than": "60", "waiting": "yes"}
    for name in NAMED[model]:
        value = values.get(name.rpartition("__")[2], "default")
        assert client.get(list_of(model), {name: value}).status_code == 200, name


@pytest.mark.parametrize("model", NAMED)
def test_a_value_that_a_filter_cannot_read_is_no_error_of_the_server(objects, model):
    client = visitor(f"view_{model._meta.model_name}")
    for name in NAMED[model]:
        for value in ("", "x", "'", "1e999", "2020-99-99", "[]"):
            assert client.get(list_of(model), {name: value}).status_code in (200, 302), name


@pytest.mark.parametrize("model", NAMED)
def test_the_filters_beside_a_list_lead_to_nothing_that_is_refused(objects, model):
    client = visitor(f"view_{model._meta.model_name}")
    page = client.get(list_of(model))
    queries = {
        choice["query_string"]
        for spec in page.context["cl"].filter_specs
        for choice in spec.choices(page.context["cl"])
    }
    assert len(queries) > 1
    for query in queries:
        assert client.get(list_of(model) + query).status_code == 200, query


@pytest.mark.parametrize("model", NAMED)
def test_a_name_of_no_column_is_refused_too(objects, model):
    client = visitor(f"view_{model._meta.model_name}")
    assert client.get(list_of(model), {"nothing": "1"}).status_code == 400


def test_a_site_may_name_further_filters(objects, rf):
    """Of its own subclass: by field, with a class, across a relation, and by date."""

    class OfTheSite(type(admin.site._registry[FollowUp])):
        list_filter = ("task", ("record", admin.RelatedOnlyFieldListFilter), "record__scope")
        date_hierarchy = "created_at"

    request = rf.get("/")
    request.user = User.objects.create_superuser("root")
    asked = OfTheSite(FollowUp, admin.site).lookup_allowed
    for lookup in ("task", "record__id__exact", "record__scope", "created_at__year"):
        assert asked(lookup, "1", request), lookup
    for lookup in ("task__contains", "record__message__contains", "record__scope__contains"):
        assert not asked(lookup, "1", request), lookup


def test_users_can_be_asked_for_by_those_who_may_see_them(objects):
    client = visitor("view_lockevent", "view_user")
    found = client.get(list_of(LockEvent), {"user": OPERATOR}).context["cl"].result_list
    assert [event.user for event in found] == [OPERATOR]
    assert client.get(list_of(LockEvent), {"detail__contains": "x"}).status_code == 400


# -- requests that no link of ours makes ----------------------------------------------------

EARLIEST = "0001-01-01 00:00:00+14:00"


@pytest.mark.parametrize("model", NAMED)
def test_a_query_that_no_link_makes_is_no_error_of_the_server(objects, model):
    client, pk = visitor(f"view_{model._meta.model_name}"), objects[model]
    fields = {field.name for field in model._meta.get_fields()}
    queries = [
        *({"_to_field": name} for name in (*fields, "pk", "nothing", "\0")),
        *({name: EARLIEST} for name in NAMED[model] if name.endswith(("__gte", "__lt"))),
        *({name: "\0"} for name in (*NAMED[model], "q", "p", "o")),
        *({name: "9" * 40} for name in ("p", "o", "e", "all")),
    ]
    for address in (list_of(model), *pages_of(model, pk)):
        for query in queries:
            status = client.get(address, query).status_code
            assert status in (200, 302, 400, 403, 404), (address, query)
    for name in NAMED[model]:
        # On PostgreSQL, a query with it would fail.
        assert client.get(list_of(model), {name: "\0"}).status_code == 400, name


def test_a_form_that_no_page_of_ours_makes_is_no_error_of_the_server(objects):
    client = visitor(*permissions())
    record = objects[IdempotencyRecord]
    for step in ("forget", "rerun"):
        page = reverse(f"admin:django_dlock_idempotencyrecord_{step}", args=[record])
        for attempt in ("9" * 40, "x", "\0"):
            form = {"attempt": attempt, "state": "failed", "owner": "owner", "force": "on"}
            assert client.post(page, form).status_code in (200, 302), attempt
    for chosen in ("x", "\0", "9" * 400, "9" * 5000, "\u0661", ""):
        form = {"action": "publish_selected", "_selected_action": [chosen]}
        assert client.post(list_of(FollowUp), form).status_code in (302, 400), chosen
    assert FollowUp.objects.get().published_at is None
    assert IdempotencyRecord.objects.count() == 1


# -- every page, with each permission alone ------------------------------------------------


def pages_of(model, pk):
    """The addresses of all pages of a model."""
    prefix = list_of(model)
    for pattern in admin.site._registry[model].get_urls():
        route = str(pattern.pattern)
        for name in ("path:object_id", "str:object_id"):
            route = route.replace(f"<{name}>", str(pk).replace("/", "_2F").replace(":", "_3A"))
        yield prefix + route


def queries_of(model):
    """Query strings that sort and choose without a look-up."""
    yield from ("", "?_popup=1", "?all=", "?_facets=True")
    yield from (f"?o={sign}{column}" for column in range(15) for sign in ("", "-"))
    yield from (f"?_to_field={field.name}" for field in model._meta.concrete_fields)


def permissions():
    """Each of ours, and the one to see users."""
    yield "view_user"
    for model in apps.get_app_config("django_dlock").get_models():
        yield from (f"{each}_{model._meta.model_name}" for each in model._meta.default_permissions)
        yield from (codename for codename, _name in model._meta.permissions)


@pytest.mark.parametrize("permission", list(permissions()))
def test_one_permission_alone_shows_neither_arguments_nor_results_nor_users(objects, permission):
    client, seen = visitor(permission), 0
    for model, pk in objects.items():
        addresses = [*pages_of(model, pk), *(list_of(model) + query for query in queries_of(model))]
        for address in addresses:
            response = client.get(address, follow=True)
            assert response.status_code in (200, 400, 403, 404), address
            seen += response.status_code == 200
            page = response.content.decode()
            assert SECRET not in page, address
            assert ANSWER not in page, address
            assert OPERATOR not in page, address
    # With a permission to see a list, there were pages to look at.
    assert seen > 10 or permission not in {f"view_{model._meta.model_name}" for model in MODELS}


def test_a_search_finds_nothing_by_what_is_hidden(objects):
    client = visitor(*(f"view_{model._meta.model_name}" for model in NAMED))
    for model in NAMED:
        for text in (SECRET, ANSWER, OPERATOR):
            rows = client.get(list_of(model), {"q": text}).context["cl"].result_list
            assert not list(rows), (model, text)


def test_a_choice_of_records_needs_the_permission_to_see_them(objects):
    facts = {"app_label": "django_dlock", "model_name": "followup", "field_name": "record"}
    address = reverse("admin:autocomplete")
    client = visitor("view_followup")
    assert client.get(address, {**facts, "term": "42"}).status_code == 403
    User.objects.all().delete()
    client = visitor("view_idempotencyrecord")
    for term, found in (("42", 1), (SECRET, 0), (ANSWER, 0), ("fingerprint", 0)):
        answer = client.get(address, {**facts, "term": term}).json()
        assert len(answer["results"]) == found


def test_the_fingerprint_is_shown_to_those_who_may_see_the_arguments(objects):
    """An unkeyed one, of an earlier version, could be guessed."""
    page = reverse("admin:django_dlock_idempotencyrecord_change", args=[objects[IdempotencyRecord]])
    assert b"v1:fingerprint" not in visitor("view_idempotencyrecord").get(page).content
    User.objects.all().delete()
    client = visitor("view_idempotencyrecord", "rerun_idempotencyrecord")
    assert b"v1:fingerprint" in client.get(page).content


@pytest.mark.parametrize(
    "permission", ["forget_idempotencyrecord", "rerun_idempotencyrecord", "view_followup"]
)
def test_no_other_permission_shows_results(objects, permission):
    """Not even together with the one to see records, on the pages of the steps."""
    client = visitor("view_idempotencyrecord", permission)
    for model in (IdempotencyRecord, FollowUp):
        for address in pages_of(model, objects[model]):
            assert ANSWER not in client.get(address, follow=True).content.decode(), address


def test_results_and_texts_of_errors_are_shown_to_those_who_may_see_them(objects):
    page = reverse("admin:django_dlock_idempotencyrecord_change", args=[objects[IdempotencyRecord]])
    shown = visitor("view_idempotencyrecord").get(page).content.decode()
    # The type of an error is that of a class, and helps those who look for its cause.
    assert "ValueError" in shown
    assert "no such colour" not in shown
    User.objects.all().delete()
    client = visitor("view_idempotencyrecord", "view_results_idempotencyrecord")
    shown = client.get(page).content.decode()
    assert shown.count(ANSWER) >= 2
    assert "no such colour" in shown


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("ValueError('42')", "ValueError"),
        ("ValueError: 42", "ValueError"),
        ("shop.errors.Declined(card='42')", "shop.errors.Declined"),
        ("HTTP 502", "HTTP 502"),
        ("cancelled before the view began", "cancelled before the view began"),
        ("Key '42' in scope 's' had 5 runs that died in the middle", "not known"),
        ("<Exception of customer 42>", "not known"),
        ("42: gone", "not known"),
    ],
)
def test_the_kind_of_an_error_says_nothing_of_its_text(objects, error, kind):
    IdempotencyRecord.objects.update(error=error)
    page = reverse("admin:django_dlock_idempotencyrecord_change", args=[objects[IdempotencyRecord]])
    shown = visitor("view_idempotencyrecord").get(page).context["adminform"]
    fields = {
        field.field["field"]: field.contents() for line in shown for row in line for field in row
    }
    assert kind in fields["error_kind"]
    assert "42" not in fields["error_kind"]
