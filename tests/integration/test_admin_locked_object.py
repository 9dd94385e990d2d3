"""The locks of an object on its page in the project's own admin, and their release there."""

from __future__ import annotations

import re

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import path, reverse

from django_dlock import locks, process
from django_dlock.admin import LockedObjectAdmin
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import LockEvent
from testproject.shop.models import Order, Stock

LOCAL = "django_dlock.backends.local.LocalBackend"

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]


class DownBackend(LocalBackend):
    """An alias that does not answer."""

    def get(self, name):
        raise BackendUnavailable("nobody answers", name, self.alias)


class WithoutListing(LocalBackend):
    """A store such as ZooKeeper, which cannot list its locks."""

    capabilities = LocalBackend.capabilities - {"listing"}


class OrderAdmin(LockedObjectAdmin):
    lock_keys = ("order:{object.number}", lambda order: f"invoice:{order.number}")


# A site of the project's own, on which the pages of the package are not registered.
ops = admin.AdminSite(name="ops")
ops.register(Order, OrderAdmin)
urlpatterns = [path("admin/", admin.site.urls), path("ops/", ops.urls)]


@pytest.fixture(autouse=True)
def aliases(settings):
    use(settings, default=LOCAL)
    yield
    locks.reset()


def use(settings, **backends):
    settings.DLOCKS = {alias: {"BACKEND": backend} for alias, backend in backends.items()}
    locks.reset()


@pytest.fixture
def order(db):
    return Order.objects.create(number=5)


def hold(name, alias="default", owner=None, **facts):
    backend = locks[alias]
    request = LeaseRequest(name=name, owner=owner or f"owner of {name}", ttl=30, **facts)
    lease = backend.acquire(request, deadline=backend.call_deadline())
    assert isinstance(lease, Lease)


def say_goodbye(alias="default"):
    backend = locks[alias]
    backend.deregister(process.current().id, deadline=backend.call_deadline())


def visitor(*permissions):
    user = User.objects.create_user(f"visitor-{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    client.user = user
    return client


@pytest.fixture
def operator(db):
    return visitor("change_order", "view_heldlock", "release_heldlock")


def url_of(order, page="change"):
    return reverse(f"admin:shop_order_{page}", args=[order.pk], current_app="ops")


def panel(client, order):
    response = client.get(url_of(order))
    assert response.status_code == 200
    page = response.content.decode()
    found = re.search(
        r'<div class="dlock-panel">.*?<fieldset|<div class="dlock-panel">.*', page, re.DOTALL
    )
    return found[0].partition("submit-row")[0]


def release(client, order, *names, force=False, owners=None, query=""):
    answers = {
        "_selected_action": [f"default/{name}" for name in names],
        "owner": owners or [f"owner of {name}" for name in names],
        **({"force": "on"} if force else {}),
    }
    return client.post(url_of(order, "release_locks") + query, answers, follow=True)


def messages_on(response):
    return [str(message) for message in response.context["messages"]]


@pytest.fixture
def of_order(monkeypatch):
    """Set attributes of the order's admin."""

    def change(**facts):
        page = ops.get_model_admin(Order)
        vars(page).pop("_keys", None)
        for name, value in facts.items():
            monkeypatch.setattr(page, name, value, raising=False)

    yield change
    vars(ops.get_model_admin(Order)).pop("_keys", None)


# -- the page ------------------------------------------------------------------------------


def test_the_page_of_an_object_shows_its_locks_and_no_others(operator, order):
    hold("order:5", metadata='{"task_name": "shop.charge", "task_id": "t-1"}')
    hold("invoice:5")
    hold("order:6")
    shown = panel(operator, order)
    assert "order:<wbr>5" in shown
    assert "invoice:<wbr>5" in shown
    assert "order:<wbr>6" not in shown
    for fact in ("alive", "charge", "t-1", "TTL left", "Waiting"):
        assert fact in shown


def test_an_object_without_locks_says_so(operator, order):
    assert "No lock of this object is held." in panel(operator, order)
    assert "release" not in panel(operator, order)


def test_a_new_object_has_no_locks_to_show(order):
    client = visitor("add_order")
    page = client.get(reverse("admin:shop_order_add", current_app="ops"))
    assert page.status_code == 200
    assert b"dlock-panel" not in page.content


def test_locks_of_every_chosen_alias_are_shown(operator, order, settings, of_order):
    use(settings, default=LOCAL, billing=LOCAL, other=LOCAL)
    of_order(lock_using=("default", "billing"))
    hold("order:5")
    hold("invoice:5", alias="billing")
    hold("order:5", alias="other")
    shown = panel(operator, order)
    assert "<dd>default</dd>" in shown
    assert "<dd>billing</dd>" in shown
    assert "other" not in shown


@pytest.mark.parametrize(
    "trouble",
    [("DownBackend", "nobody answers"), ("WithoutListing", "cannot list its locks")],
    ids=str,
)
def test_an_alias_that_gives_no_answer_is_named_in_place(
    operator, order, settings, of_order, trouble
):
    backend, text = trouble
    use(settings, default=LOCAL, billing=f"{__name__}.{backend}")
    of_order(lock_using=("billing", "default"))
    hold("order:5")
    shown = panel(operator, order)
    assert text in shown
    assert "order:<wbr>5" in shown
    assert "No lock" not in shown
    confirmation = operator.get(url_of(order, "release_locks"))
    assert confirmation.status_code == 200
    assert [row["info"].name for row in confirmation.context["rows"]] == ["order:5"]


def test_with_no_alias_that_answers_there_is_nothing_to_release(operator, order, settings):
    use(settings, default=f"{__name__}.DownBackend")
    assert "nobody answers" in panel(operator, order)
    response = operator.get(url_of(order, "release_locks"), follow=True)
    assert response.redirect_chain == [(url_of(order), 302)]
    assert any("nobody answers" in message for message in messages_on(response))


def test_wrong_settings_are_reported_in_place(operator, order, settings):
    settings.DLOCKS = {"default": {"BACKEND": "nowhere.Backend"}}
    locks.reset()
    assert "nowhere" in panel(operator, order)


def test_a_key_without_a_value_is_left_out_and_a_broken_one_is_reported(operator, order, of_order):
    def broken(order):
        raise ZeroDivisionError("of the project")

    of_order(lock_keys=("order:{object.nothing}", "paid:{object.paid}", broken, "order:1"))
    hold("order:1")
    shown = panel(operator, order)
    assert "nothing" not in shown
    assert "renders str" in shown
    assert "of the project" in shown
    assert "order:<wbr>1" in shown


def test_declared_fields_and_fieldsets_stay_as_they_are(rf, order, admin_user):
    request = rf.get("/")
    request.user = admin_user

    def sets_of(**attributes):
        page = type("Page", (OrderAdmin,), attributes)(Order, admin.AdminSite())
        return [list(options["fields"]) for _, options in page.get_fieldsets(request, order)]

    assert sets_of() == [["number", "paid"], ["object_locks"]]
    assert sets_of(fields=("number",)) == [["number"], ["object_locks"]]
    assert sets_of(fields=("object_locks", "number")) == [["object_locks", "number"]]
    assert sets_of(fieldsets=[("A", {"fields": ["paid", "object_locks"]})]) == [
        ["paid", "object_locks"]
    ]
    assert sets_of(readonly_fields=("paid",)) == [["number", "paid"], ["object_locks"]]


def test_the_page_has_no_inline_code(operator, order):
    hold("order:5")
    hold('order:"><script>alert(1)</script>')
    for page in ("change", "release_locks"):
        text = operator.get(url_of(order, page)).content.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)(?![^>]*json)", text)
        assert " style=" not in text
        assert " onclick=" not in text


def test_the_object_can_still_be_saved(operator, order):
    hold("order:5")
    response = operator.post(url_of(order), {"number": "5", "paid": "on"})
    assert response.status_code == 302
    order.refresh_from_db()
    assert order.paid


def test_a_lock_leads_to_the_page_of_held_locks_where_there_is_one(operator, order):
    hold("order:5")
    link = "/django_dlock/heldlock/default_2Forder_3A5/change/"
    assert link not in panel(operator, order)
    url = reverse("admin:shop_order_change", args=[order.pk])
    assert f'href="/admin{link}"' in operator.get(url).content.decode()
    may_not_see_locks = visitor("change_order")
    assert link not in may_not_see_locks.get(url).content.decode()


# -- the release ---------------------------------------------------------------------------


def test_a_dead_holders_lock_is_released_from_the_page_of_its_object(operator, order):
    hold("order:5")
    say_goodbye()
    response = release(operator, order, "order:5")
    assert response.redirect_chain == [(url_of(order), 302)]
    assert messages_on(response) == ["The lock “order:5” of alias “default” was released."]
    assert locks["default"].get("order:5") is None
    entry, event = LogEntry.objects.get(), LockEvent.objects.get()
    assert entry.object_id == "default/order:5"
    assert (event.name, event.event, event.user) == ("order:5", "broken", operator.user.username)


def test_all_locks_of_an_object_are_released_with_one_confirmation(operator, order):
    hold("order:5")
    hold("invoice:5")
    hold("order:6")
    page = operator.get(url_of(order, "release_locks"))
    assert [row["info"].name for row in page.context["rows"]] == ["order:5", "invoice:5"]
    assert url_of(order) in page.content.decode()
    refused = release(operator, order, "order:5", "invoice:5")
    assert "may still be running" in refused.content.decode()
    assert locks["default"].count() == 3
    response = release(operator, order, "order:5", "invoice:5", force=True)
    assert len(messages_on(response)) == 2
    assert [info.name for info in locks["default"].list()] == ["order:6"]
    assert LockEvent.objects.count() == 2


def test_one_lock_of_several_can_be_released(operator, order):
    hold("order:5")
    hold("invoice:5")
    link = re.search(r'href="([^"]*release/\?[^"]*invoice[^"]*)"', panel(operator, order))[1]
    page = operator.get(link)
    assert [row["info"].name for row in page.context["rows"]] == ["invoice:5"]
    release(operator, order, "invoice:5", force=True)
    assert [info.name for info in locks["default"].list()] == ["order:5"]


def test_a_lock_that_is_not_the_objects_is_not_released_there(operator, order):
    hold("order:6")
    for response in (
        release(operator, order, "order:6", force=True),
        operator.get(url_of(order, "release_locks") + "?lock=default/order:6", follow=True),
    ):
        assert messages_on(response) == [
            "This object has changed since the page was loaded. Nothing was done."
        ]
    assert locks["default"].get("order:6") is not None


def test_a_lock_of_another_alias_is_not_released_there(operator, order, settings):
    use(settings, default=LOCAL, other=LOCAL)
    hold("order:5", alias="other")
    operator.post(
        url_of(order, "release_locks"),
        {"_selected_action": "other/order:5", "owner": "owner of order:5", "force": "on"},
    )
    assert locks["other"].get("order:5") is not None


def test_a_lock_with_another_owner_is_not_released(operator, order):
    hold("order:5", owner="the next one")
    response = release(operator, order, "order:5", force=True)
    assert "now has another owner" in messages_on(response)[0]
    assert locks["default"].get("order:5") is not None


def test_opening_the_confirmation_releases_nothing(operator, order):
    hold("order:5")
    operator.get(url_of(order, "release_locks") + "?force=on&owner=owner of order:5")
    assert locks["default"].get("order:5") is not None


def test_without_a_lock_there_is_nothing_to_confirm(operator, order):
    response = operator.get(url_of(order, "release_locks"), follow=True)
    assert response.redirect_chain == [(url_of(order), 302)]
    assert messages_on(response) == ["No lock of this object is held any more."]


def test_the_release_of_an_object_that_is_gone_redirects(operator, order):
    url = url_of(order, "release_locks")
    order.delete()
    assert operator.get(url).status_code == 302


# -- permissions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "permissions",
    [
        ("view_order",),
        ("change_order",),
        ("change_order", "view_heldlock"),
        ("change_order", "release_heldlock"),
    ],
)
def test_without_the_permission_to_release_the_panel_is_read_only(order, permissions):
    client = visitor(*permissions)
    hold("order:5")
    shown = panel(client, order)
    assert "order:<wbr>5" in shown
    assert "Release" not in shown
    assert release(client, order, "order:5", force=True).status_code == 403
    assert client.get(url_of(order, "release_locks")).status_code == 403
    assert locks["default"].get("order:5") is not None


def test_without_the_permission_to_see_the_object_its_locks_are_not_released(order):
    client = visitor("view_heldlock", "release_heldlock")
    hold("order:5")
    assert client.get(url_of(order)).status_code == 403
    assert release(client, order, "order:5", force=True).status_code == 403
    assert locks["default"].get("order:5") is not None
    # Nor is it told which objects there are.
    url = url_of(order, "release_locks")
    order.delete()
    assert client.get(url).status_code == 403


def test_the_user_of_a_request_is_shown_only_to_those_who_may_see_users(order):
    hold("order:5", metadata='{"path": "/checkout/", "user": "name-of-user"}')
    assert "name-of-user" not in panel(visitor("view_order"), order)
    assert "name-of-user" in panel(visitor("view_order", "view_user"), order)


def test_a_release_needs_the_csrf_token(operator, order):
    hold("order:5")
    client = Client(enforce_csrf_checks=True)
    client.force_login(operator.user)
    assert release(client, order, "order:5", force=True).status_code == 403
    assert locks["default"].get("order:5") is not None


# -- checks --------------------------------------------------------------------------------


def found_for(model=Order, **attributes):
    page = type("Page", (LockedObjectAdmin,), attributes)(model, admin.AdminSite())
    return [(message.id, message.msg) for message in page.check()]


def test_a_correct_page_passes_the_checks():
    keys = ("order:{object.pk}", lambda order: "x", "all", "part:{object.number.real:>3}")
    assert found_for(lock_keys=keys, lock_using="default") == []


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ((), "is empty"),
        ("order:{object.pk}", "takes a list or tuple"),
        (("order:{order.pk}",), "names the argument 'order', which does not exist"),
        (("order:{object.pk",), "expected '}'"),
        (("order:{object}",), "is a whole object"),
        ((["pk"],), "takes templates such as"),
        ((3,), "takes templates such as"),
    ],
)
def test_wrong_keys_are_errors(keys, text):
    ((id_, message),) = found_for(lock_keys=keys)
    assert id_ == "django_dlock.E201"
    assert text in message


@pytest.mark.parametrize("using", ["nowhere", ("default", "nowhere")])
def test_an_unknown_alias_is_an_error(using):
    ((id_, message),) = found_for(lock_keys=("order:{object.pk}",), lock_using=using)
    assert id_ == "django_dlock.E202"
    assert "'nowhere', which DLOCKS does not define; it defines 'default'" in message


def test_an_attribute_that_the_model_lacks_is_a_warning():
    ((id_, message),) = found_for(Stock, lock_keys=("stock:{object.artikel}",))
    assert id_ == "django_dlock.W201"
    assert "'artikel', which Stock does not have" in message


def test_wrong_settings_are_reported_once(settings):
    settings.DLOCKS = []
    assert found_for(lock_keys=("order:{object.pk}",)) == []
