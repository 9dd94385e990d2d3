"""Every page of ours in the admin, with every permission alone and beside the one to see its list.

The pages are those of ``get_urls()`` and the look-ups those that Django has registered, so a new
page, field, look-up or permission is tested without a change here.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.admin import ModelAdmin
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import models
from django.db.models.constants import LOOKUP_SEP
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils import timezone

from django_dlock import locks
from django_dlock.admin import LockedObjectAdmin
from django_dlock.admin.lookups import NamedLookups
from django_dlock.lease import LeaseRequest
from django_dlock.models import FollowUp, HeldLock, IdempotencyRecord, LockEvent, LockStatistics
from testproject.shop.models import Order

pytestmark = pytest.mark.django_db

OURS = apps.get_app_config("django_dlock")
PAGES: dict[type[models.Model], ModelAdmin[Any]] = {
    model: page
    for model, page in admin.site._registry.items()
    if model._meta.app_config is OURS or isinstance(page, LockedObjectAdmin)
}
LISTS = {model: page for model, page in PAGES.items() if isinstance(page, NamedLookups)}

HIDDEN = {
    "sesame-arguments": {"view_idempotencyrecord", "rerun_idempotencyrecord"},
    "sesame-fingerprint": {"view_idempotencyrecord", "rerun_idempotencyrecord"},
    "sesame-result": {"view_idempotencyrecord", "view_results_idempotencyrecord"},
    "sesame-error": {"view_idempotencyrecord", "view_results_idempotencyrecord"},
    "sesame-user": {"view_user"},
    # Nobody sees the message of a follow-up, or an answer of a view that is no JSON.
    "sesame-followup": {"nobody"},
}
"""What hidden columns contain → the permissions that together show it."""


def view_of(model: type[models.Model]) -> str:
    return f"view_{model._meta.model_name}"


def permissions() -> set[str]:
    """Each of ours, and those to see users, and objects whose page shows their locks."""
    found = {"view_user", *(view_of(model) for model in PAGES)}
    for opts in (model._meta for model in OURS.get_models()):
        found |= {f"{each}_{opts.model_name}" for each in opts.default_permissions}
        found |= {codename for codename, _name in opts.permissions}
    return found


ALONE = [frozenset({permission}) for permission in sorted(permissions())]
STEPS = {permission for permission in permissions() if not permission.startswith("view_")}
TOGETHER = sorted(
    {
        frozenset({view_of(model), permission})
        for model in PAGES
        for permission in {*STEPS, "view_results_idempotencyrecord", "view_user"}
    },
    key=sorted,
)


def named(codenames: frozenset[str]) -> str:
    return "-".join(sorted(codenames))


@pytest.fixture(autouse=True)
def aliases(settings: Any) -> Iterator[None]:
    settings.DLOCKS = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}
    locks.reset()
    yield
    locks.reset()


@pytest.fixture
def ids() -> dict[type[models.Model], Any]:
    """One object of each model; every hidden column has a text of its own."""
    now = timezone.now()
    later = now + dt.timedelta(days=7)
    message = {"task": "shop.charge", "args": ["sesame-arguments"], "kwargs": {}, "options": {}}
    record = IdempotencyRecord.objects.create(
        digest=IdempotencyRecord.digest_of("shop.charge", "42"),
        scope="shop.charge",
        key="42",
        payload="sesame-fingerprint",
        state="failed",
        attempt=1,
        lock_alias="default",
        lock_name="order:42",
        owner="owner",
        message=json.dumps(message),
        result=json.dumps({"body": "sesame-result"}),
        error="ValueError('sesame-error')",
        created_at=now,
        started_at=now,
        expires_at=later,
    )
    follow_up = FollowUp.objects.create(
        record=record,
        task="shop.receipt",
        task_id="t",
        message=json.dumps({**message, "args": ["sesame-followup"]}),
        created_at=now,
        expires_at=later,
    )
    event = LockEvent.objects.create(
        when=now, event="broken", alias="default", name="order:42", user="sesame-user"
    )
    facts = json.dumps({"user": "sesame-user", "path": "/pay/"})
    backend = locks["default"]
    request = LeaseRequest("order:42", "owner", 30, metadata=facts)
    backend.acquire(request, deadline=backend.call_deadline())
    found: dict[type[models.Model], Any] = {
        HeldLock: "default/order:42",
        IdempotencyRecord: record.pk,
        FollowUp: follow_up.pk,
        LockEvent: event.pk,
        LockStatistics: "none",
    }
    # Its page shows the lock from above.
    found[Order] = Order.objects.create(number=42).pk
    assert set(found) == set(PAGES)
    return found


def visitor(codenames: Any) -> Client:
    user = User.objects.create_user("visitor", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


def list_of(model: type[models.Model]) -> str:
    opts = model._meta
    return reverse(f"admin:{opts.app_label}_{opts.model_name}_changelist")


def addresses(model: type[models.Model], pk: Any) -> Iterator[str]:
    """The addresses of all pages of a model, for this object."""
    for pattern in PAGES[model].get_urls():
        route = str(pattern.pattern)
        for converter in ("path", "str", "int"):
            route = route.replace(f"<{converter}:object_id>", str(quote(pk)))
            route = route.replace(f"<{converter}:content_type_id>", "1")
        assert "<" not in route, f"put a value in the place of each argument of {route}"
        yield list_of(model) + route


def answers(client: Client, address: str, pk: Any) -> Iterator[tuple[str, HttpResponse]]:
    """What the page says to each kind of request, and where each of them leads."""
    seen = {"attempt": "1", "state": "failed", "owner": "owner", "force": "on", "token": "1"}
    chosen = {"_selected_action": [pk], "index": "0", "select_across": "1"}
    requests: list[tuple[str, dict[str, Any] | None]] = [
        ("GET", None),
        ("POST", {}),
        ("POST", seen),
    ]
    if any(address == list_of(model) for model in PAGES):
        actions = ("publish_selected", "release_selected", "delete_selected")
        requests += (("POST", {**chosen, "action": action}) for action in actions)
    for method, data in requests:
        told = f"{method} {address} {data}"
        response = client.post(address, data) if method == "POST" else client.get(address)
        yield told, response
        if response.status_code == 302:
            yield f"{told} → {response['Location']}", client.get(response["Location"])


def told_by(response: HttpResponse) -> str:
    """Body, headers and cookies."""
    headers = "\n".join(f"{name}: {value}" for name, value in response.items())
    return f"{headers}\n{response.cookies.output()}\n{response.content.decode()}"


def check(codenames: frozenset[str], ids: dict[type[models.Model], Any]) -> int:
    """Ask for every page; returns how many were shown."""
    client, shown = visitor(codenames), 0
    secrets = [secret for secret, needed in HIDDEN.items() if not needed <= codenames]
    for model, pk in ids.items():
        for address in addresses(model, pk):
            for told, response in answers(client, address, pk):
                assert response.status_code in {200, 302, 400, 403, 404}, told
                page = told_by(response)
                assert [secret for secret in secrets if secret in page] == [], told
                shown += response.status_code == 200
    return shown


@pytest.mark.extended
@pytest.mark.parametrize("codenames", ALONE, ids=named)
def test_one_permission_alone(codenames: frozenset[str], ids: Any) -> None:
    (codename,) = codenames
    shown = check(codenames, ids)
    # Only the one to see a list shows anything; that of users has no page of ours.
    assert bool(shown) == (codename in {view_of(model) for model in PAGES})


@pytest.mark.extended
@pytest.mark.parametrize("codenames", TOGETHER, ids=named)
def test_a_permission_beside_the_one_to_see_a_list(codenames: frozenset[str], ids: Any) -> None:
    assert check(codenames, ids) > 0


@pytest.mark.parametrize("model", PAGES, ids=lambda model: model.__name__)
def test_without_the_permission_to_see_a_list_all_its_pages_are_refused(
    model: type[models.Model], ids: Any
) -> None:
    """Whatever other permission a visitor has."""
    others = permissions() - {
        f"{each}_{model._meta.model_name}" for each in ("view", "add", "change", "delete")
    }
    client = visitor(others)
    for address in addresses(model, ids[model]):
        if not address.endswith(f"/{ids[model]}/"):
            for told, response in answers(client, address, ids[model]):
                if "→" not in told:
                    assert response.status_code in (302, 403), told
                    assert "sesame" not in told_by(response), told


@pytest.mark.parametrize("model", PAGES, ids=lambda model: model.__name__)
def test_visitors_and_users_who_are_no_staff_are_sent_to_the_login(
    model: type[models.Model], ids: Any
) -> None:
    customer = Client()
    user = User.objects.create_user("customer")
    user.user_permissions.set(Permission.objects.all())
    customer.force_login(user)
    for client in (Client(), customer):
        for address in addresses(model, ids[model]):
            for method in (client.get, client.post):
                response = method(address)
                assert response.status_code == 302, address
                # Django's last page leads from an old address to the new one.
                assert response["Location"].startswith(("/admin/login/", "../"))


def test_what_is_hidden_is_shown_to_those_who_may_see_it(ids: Any) -> None:
    """So the tests above can fail."""
    client = visitor(permissions())
    page = "".join(
        told_by(client.get(address)) for model in ids for address in addresses(model, ids[model])
    )
    assert {secret for secret in HIDDEN if secret not in page} == {"sesame-followup"}


# -- look-ups ------------------------------------------------------------------------------


def lookups_of(field: Any, depth: int = 2) -> Iterator[str]:
    """Each look-up that Django knows for a column, also on a part of it: ``year__gte``."""
    yield ""
    for name, kind in getattr(field, "get_lookups", dict)().items():
        yield LOOKUP_SEP + name
        if depth > 1 and issubclass(kind, models.Transform):
            output = getattr(kind, "output_field", None)
            inner = output if isinstance(output, models.Field) else models.IntegerField()
            yield from (LOOKUP_SEP + name + each for each in lookups_of(inner, depth - 1))
    if isinstance(field, models.JSONField):
        yield from (f"__key{each}" for each in lookups_of(models.TextField(), 1))


def columns_of(model: type[models.Model], *, relations: bool = True) -> Iterator[tuple[str, Any]]:
    """Each column, also those of related objects."""
    yield "pk", model._meta.pk
    for field in model._meta.get_fields():
        yield field.name, field
        if isinstance(field, models.Field):
            yield field.attname, field
        if field.is_relation and relations and field.related_model is not None:
            related: Any = field.related_model
            for name, inner in columns_of(related, relations=False):
                yield f"{field.name}__{name}", inner


def asked_of(model: type[models.Model]) -> set[str]:
    return {name + lookup for name, field in columns_of(model) for lookup in lookups_of(field)}


def named_by(model: type[models.Model], client: Client) -> set[str | None]:
    request = RequestFactory().get("/")
    request.user = User.objects.get(pk=client.session["_auth_user_id"])
    return set(LISTS[model].get_lookups(request))


@pytest.mark.parametrize("model", LISTS, ids=lambda model: model.__name__)
def test_no_registered_look_up_is_allowed_but_those_that_the_list_names(
    model: type[models.Model], ids: Any
) -> None:
    client = visitor([view_of(model)])
    named, asked = named_by(model, client), asked_of(model)
    request = RequestFactory().get("/")
    request.user = User.objects.get(pk=client.session["_auth_user_id"])
    page = LISTS[model]
    assert {name for name in asked if page.lookup_allowed(name, "x", request)} <= named
    assert len(asked) > 50
    # None of those leads to a column whose content is hidden, or compares a part of a text.
    for name in named:
        column, _, lookup = str(name).partition(LOOKUP_SEP)
        assert column not in {"message", "result", "error", "payload", "user", "detail", "owner"}
        assert lookup in {"", "exact", "isnull", "gte", "lt", "year", "month", "day"}, name


@pytest.mark.parametrize("model", LISTS, ids=lambda model: model.__name__)
def test_a_value_that_postgresql_cannot_compare_is_refused(
    model: type[models.Model], ids: Any
) -> None:
    """On every database, so that it is no error 500 on PostgreSQL."""
    client = visitor([view_of(model), "view_user"])
    for name in named_by(model, client):
        for value in ("\0", "a\0b"):
            assert client.get(list_of(model), {str(name): value}).status_code == 400, name


SECRETS = {
    IdempotencyRecord: {
        "message": "sesame-arguments",
        "result": "sesame-result",
        "error": "sesame-error",
        "payload": "sesame-fingerprint",
        "follow_ups__message": "sesame-followup",
        "owner": "owner",
    },
    FollowUp: {
        "message": "sesame-followup",
        "record__message": "sesame-arguments",
        "record__result": "sesame-result",
        "record__payload": "sesame-fingerprint",
    },
    LockEvent: {"user": "sesame-user", "detail": "{}"},
}


@pytest.mark.parametrize("model", SECRETS, ids=lambda model: model.__name__)
def test_a_hidden_column_changes_no_answer(model: type[models.Model], ids: Any) -> None:
    """Neither by its whole value nor by its first letter, nor in another order of the list."""
    client = visitor([view_of(model)])
    fields = dict(columns_of(model))
    for name, secret in SECRETS[model].items():
        for lookup in sorted(set(lookups_of(fields[name], 1))):
            for right, wrong in ((secret, "absent"), (secret[0], "~")):
                queries = ({f"{name}{lookup}": value} for value in (right, wrong))
                found = [client.get(list_of(model), query).status_code for query in queries]
                assert found == [400, 400], (name, lookup)
