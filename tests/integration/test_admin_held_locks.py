"""The page of held locks and its guarded release."""

from __future__ import annotations

import re
from html import unescape
from types import SimpleNamespace
from unittest import mock

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import DatabaseError, InterfaceError, transaction
from django.test import Client
from django.urls import reverse

from django_dlock import locks, process, signals
from django_dlock.admin import held_locks
from django_dlock.backends.local import LocalBackend
from django_dlock.core import dispatch
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.models import LockEvent
from django_dlock.operators import audit

LOCAL = "django_dlock.backends.local.LocalBackend"
LIST = "/admin/django_dlock/heldlock/"

pytestmark = pytest.mark.django_db


class DownBackend(LocalBackend):
    """An alias that does not answer."""

    asked = 0

    def get(self, name):
        raise BackendUnavailable("nobody answers", name, self.alias)

    def page(self, query, **_):
        DownBackend.asked += 1
        raise BackendUnavailable("nobody answers", "", self.alias)


class UnansweredBreak(LocalBackend):
    """The break is executed, but its answer is lost."""

    def break_silently(self, name, *, owner):
        super().break_silently(name, owner=owner)
        raise BackendUnavailable("no answer", name, self.alias)


class ChangesHands(LocalBackend):
    """The lock has another owner just before the break."""

    def break_silently(self, name, *, owner):
        return False


class ReleasedMeanwhile(LocalBackend):
    """The holder releases the lock just before the break."""

    def break_silently(self, name, *, owner):
        self.release(name, owner, min_hold=0.0, deadline=self.call_deadline())
        return super().break_silently(name, owner=owner)


@pytest.fixture(autouse=True)
def aliases(settings):
    # Loads the project's views, which are made with the aliases of the project.
    reverse("admin:index")
    use(settings, default=LOCAL)
    yield
    locks.reset()


def use(settings, **backends):
    settings.DLOCKS = {alias: {"BACKEND": backend} for alias, backend in backends.items()}
    locks.reset()


def hold(name, alias="default", owner=None, **facts):
    backend = locks[alias]
    request = LeaseRequest(name=name, owner=owner or f"owner of {name}", ttl=30, **facts)
    lease = backend.acquire(request, deadline=backend.call_deadline())
    assert isinstance(lease, Lease)
    return lease


def say_goodbye(alias="default"):
    backend = locks[alias]
    backend.deregister(process.current().id, deadline=backend.call_deadline())


def visitor(*permissions, staff=True):
    user = User.objects.create_user(f"visitor-{User.objects.count()}", is_staff=staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    client.user = user
    return client


@pytest.fixture
def operator():
    return visitor("view_heldlock", "release_heldlock")


def page_of(name, alias="default", step="change"):
    return reverse(f"admin:django_dlock_heldlock_{step}", args=[quote(f"{alias}/{name}")])


def names_on(response):
    page = re.sub(r' <span class="dlock-alias">.*?</span>', "", response.content.decode())
    cells = re.findall(r'class="field-lock_name">(.*?)</th>', page, re.DOTALL)
    return [unescape(re.sub(r"<.*?>", "", cell)) for cell in cells]


def release(client, name, *, owner=None, force=False, follow=True, alias="default"):
    answers = {"owner": owner or f"owner of {name}", **({"force": "on"} if force else {})}
    return client.post(page_of(name, alias, "release"), answers, follow=follow)


def messages_on(response):
    return [str(message) for message in response.context["messages"]]


# -- the list -----------------------------------------------------------------------------


def test_the_list_shows_what_an_operator_needs(admin_client):
    hold("invoice:42", metadata='{"task_name": "shop.charge", "task_id": "t-1"}')
    page = admin_client.get(LIST).content.decode()
    assert "shop.<wbr>charge" in page, "a narrow column wraps between the words"
    page = page.replace("<wbr>", "")
    me = process.current()
    for fact in ("invoice:42", f"{me.host} · {me.pid}", "shop.charge", "t-1"):
        assert fact in page
    # These are on the page of the lock.
    for column in ("kind", "alias", "ttl", "renewals", "token"):
        assert f"column-{column}" not in page
    assert re.search(r'dlock-good">alive<', page)


def test_the_list_is_live_from_every_alias(admin_client, settings):
    use(settings, one=LOCAL, two=LOCAL)
    hold("a", "one")
    hold("a", "two")
    assert names_on(admin_client.get(LIST)) == ["a", "a"]
    assert names_on(admin_client.get(LIST + "?alias=two")) == ["a"]


def test_the_list_says_so_when_nothing_is_held(admin_client):
    assert "No lock is held now." in admin_client.get(LIST).content.decode()
    hold("a")
    assert "No held lock matches." in admin_client.get(LIST + "?q=b").content.decode()


def test_the_list_can_be_searched(admin_client):
    hold("invoice:1")
    hold("Invoice:2")
    hold("order:1")
    assert names_on(admin_client.get(LIST + "?q=nvoice")) == ["invoice:1", "Invoice:2"]
    assert names_on(admin_client.get(LIST + "?q=invoice")) == ["invoice:1"]


@pytest.mark.parametrize("sought", ["shop.char", "t-17", "/pay/"])
def test_the_list_can_be_searched_for_tasks_and_paths(admin_client, sought):
    hold("a", metadata='{"task_name": "shop.charge", "task_id": "t-17", "path": "/pay/"}')
    hold("b", metadata='{"user": "shop.charge t-17 /pay/"}')
    assert names_on(admin_client.get(LIST, {"q": sought})) == ["a"]


def test_the_list_can_be_filtered_by_kind_and_state(admin_client):
    hold("held")
    hold("parked", kind="parked")
    assert names_on(admin_client.get(LIST + "?kind=parked")) == ["parked"]
    assert names_on(admin_client.get(LIST + "?holder_state=alive")) == ["held"]
    assert names_on(admin_client.get(LIST + "?holder_state=unknown&kind=held")) == []


def test_the_list_can_be_sorted_by_every_column(admin_client):
    for name in ("b", "a", "c"):
        hold(name)
    headers = admin_client.get(LIST).content.decode()
    columns = re.findall(r'<th scope="col" class="sortable column-(\w+)', headers)
    assert columns == ["lock_name", "state", "age", "waiting", "holder"]
    for column in range(1, len(columns) + 1):
        assert sorted(names_on(admin_client.get(f"{LIST}?o={column}"))) == ["a", "b", "c"]
    assert names_on(admin_client.get(LIST + "?o=1")) == ["a", "b", "c"]
    assert names_on(admin_client.get(LIST + "?o=-1")) == ["c", "b", "a"]


AGE = 3
"""The number of the column."""


def test_of_locks_without_trouble_the_oldest_come_first_by_default(admin_client):
    for name in ("b", "a", "c"):
        hold(name)
    assert names_on(admin_client.get(LIST)) == ["b", "a", "c"]
    assert names_on(admin_client.get(LIST + "?o=")) == ["b", "a", "c"]
    assert names_on(admin_client.get(f"{LIST}?o={AGE}")) == ["c", "a", "b"]


def test_the_list_has_pages(admin_client):
    for number in range(120):
        hold(f"lock:{number:03}")
    first, last = admin_client.get(LIST), admin_client.get(LIST + "?p=3")
    assert names_on(first) == [f"lock:{number:03}" for number in range(50)]
    assert names_on(last) == [f"lock:{number:03}" for number in range(100, 120)]
    assert names_on(admin_client.get(LIST + "?p=2&o=-1"))[0] == "lock:069"
    assert len(names_on(admin_client.get(LIST + "?all="))) == 120
    assert names_on(admin_client.get(f"{LIST}?o={AGE}"))[0] == "lock:119"
    assert "120 held locks" in first.content.decode()


def test_pages_by_age_include_all_aliases(admin_client, settings):
    use(settings, one=LOCAL, two=LOCAL)
    for number in range(60):
        hold(f"lock:{number:03}", ("one", "two")[number % 2])
    assert names_on(admin_client.get(LIST))[:2] == ["lock:000", "lock:001"]
    assert names_on(admin_client.get(LIST + "?p=2")) == [f"lock:{n:03}" for n in range(50, 60)]


def test_a_page_beyond_the_end_shows_the_last_one(admin_client):
    hold("a")
    assert names_on(admin_client.get(LIST + "?p=99")) == ["a"]


@pytest.fixture
def asked(monkeypatch):
    """The calls that the page makes to the backends: alias, offset and limit."""
    asked, original = [], LocalBackend.page

    def spy(self, query, *, offset=0, limit=None):
        asked.append((self.alias, offset, limit))
        return original(self, query, offset=offset, limit=limit)

    monkeypatch.setattr(LocalBackend, "page", spy)
    return asked


def counted(*aliases):
    """What is asked for the counts above each list."""
    return [question for alias in aliases for question in ((alias, 0, 0), (alias, 0, 100))]


@pytest.mark.parametrize("more", ["", "&o=-1", "&q=lock", "&kind=held", "&holder_state=alive"])
def test_a_page_of_one_alias_reads_only_the_rows_it_shows(admin_client, settings, asked, more):
    use(settings, full=LOCAL, empty=LOCAL)
    for number in range(120):
        hold(f"lock:{number:03}", "full")
    for page, first in ((1, ("full", 0, 50)), (3, ("full", 100, 50))):
        asked.clear()
        admin_client.get(f"{LIST}?p={page}{more}")
        rows = [] if (page, more) == (1, "") else [first]
        assert [question for question in asked if question[0] == "full"] == counted("full") + rows


def test_a_page_of_several_aliases_reads_all_rows_up_to_its_end(admin_client, settings, asked):
    use(settings, one=LOCAL, two=LOCAL)
    for number in range(120):
        hold(f"lock:{number:03}", ("one", "two")[number % 2])
    asked.clear()
    assert names_on(admin_client.get(LIST)) == [f"lock:{n:03}" for n in range(50)]
    assert names_on(admin_client.get(LIST + "?p=2")) == [f"lock:{n:03}" for n in range(50, 100)]
    assert asked == counted("one", "two") * 2, "they have read the first 100"
    asked.clear()
    assert names_on(admin_client.get(LIST + "?p=3")) == [f"lock:{n:03}" for n in range(100, 120)]
    assert asked[-2:] == [("one", 0, 150), ("two", 0, 150)]


def test_every_order_includes_all_aliases(admin_client, settings):
    use(settings, one=LOCAL, two=LOCAL)
    for number in range(60):
        hold(f"lock:{number * 37 % 60:03}", ("one", "two")[number % 2])
    assert names_on(admin_client.get(LIST + "?p=2&o=1")) == [f"lock:{n:03}" for n in range(50, 60)]
    assert names_on(admin_client.get(LIST + "?p=2&o=-1")) == [
        f"lock:{n:03}" for n in range(9, -1, -1)
    ]


@pytest.mark.parametrize("wrong", [[], "redis://", 1])
def test_settings_of_a_wrong_type_are_named(admin_client, settings, wrong):
    settings.DLOCKS = wrong
    locks.reset()
    response = admin_client.get(LIST)
    page = unescape(response.content.decode())
    assert response.status_code == 200
    assert f"DLOCKS is {wrong!r}; it must be a dict of aliases" in page
    assert "No lock is held now." not in page
    assert "it must be a dict" in messages_on(admin_client.get(page_of("a"), follow=True))[0]


@pytest.mark.parametrize("query", ["?name=x", "?foo=bar", "?kind__x=1"])
def test_an_unknown_filter_redirects_to_the_list(admin_client, query):
    response = admin_client.get(LIST + query)
    assert response.status_code in (302, 400)


def test_what_a_backend_wants_operators_to_know_is_shown(admin_client, monkeypatch):
    monkeypatch.setattr(LocalBackend, "notices", lambda self: [f"switched: <b>{self.alias}\x1b"])
    page = admin_client.get(LIST).content.decode()
    assert "switched: &lt;b&gt;default\\x1b" in page


def test_an_alias_that_does_not_answer_is_named_and_the_others_are_shown(admin_client, settings):
    use(settings, default=f"{__name__}.DownBackend", spare=LOCAL, wrong="no.such.Backend")
    hold("a", "spare")
    response = admin_client.get(LIST)
    page = unescape(response.content.decode())
    assert response.status_code == 200
    assert names_on(response) == ["a"]
    assert "Alias “default” did not answer" in page
    assert "nobody answers" in page
    assert "Alias “wrong” did not answer" in page
    assert "No lock is held now." not in page
    assert "The number counts only the aliases that answered." in page


@pytest.mark.parametrize("query", ["", "?q=a", "?kind=held"])
def test_no_number_of_locks_is_shown_while_no_alias_answers(admin_client, settings, query):
    use(settings, default=f"{__name__}.DownBackend")
    page = admin_client.get(LIST + query).content.decode()
    assert "The number of held locks is not known." in page
    assert "0 held locks" not in page
    assert "0 results" not in page


def test_the_list_has_no_inline_code(admin_client):
    """A strict Content-Security-Policy would block inline code."""
    hold("a")
    for url in (LIST, page_of("a"), page_of("a", step="release")):
        page = admin_client.get(url).content.decode()
        assert "<style" not in page
        assert not re.search(r"\son\w+=", page)
        assert not re.search(r"\sstyle=", page)
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", page))
        assert not re.search(r'(src|href)="(https?:)?//', page)


# -- one lock -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["a/b", "a//b/", "naïve ☂ 鍵", "\"quotes\" & 'more' <b>", "50%_2F", "?x=1#y", "../change/"],
)
def test_a_lock_of_any_name_can_be_shown_and_released(admin_client, name):
    hold(name)
    response = admin_client.get(LIST)
    assert names_on(response) == [name]
    href = unescape(re.search(r'field-lock_name"><a href="(.*?)"', response.content.decode())[1])
    page = admin_client.get(href)
    assert page.context["original"].info.name == name
    release(admin_client, name, force=True)
    assert locks["default"].get(name) is None


def test_an_alias_of_any_name_works(admin_client, settings):
    use(settings, **{"a/b é": LOCAL})
    hold("n/m", "a/b é")
    response = admin_client.get(LIST)
    href = unescape(re.search(r'field-lock_name"><a href="(.*?)"', response.content.decode())[1])
    assert admin_client.get(href).context["original"].info.alias == "a/b é"


def test_the_page_of_one_lock_shows_its_details(admin_client):
    lease = hold("a", metadata='{"path": "/pay/", "note": "<b>"}')
    page = admin_client.get(page_of("a")).content.decode()
    assert str(lease.token) in page
    left, bar = re.search(
        r'class="dlock-left">(2\d\.\d|30\.0)s<.*?class="dlock-bar-left" width="([\d.]+)"', page
    ).groups()
    # The first page of a process may take seconds.
    assert 20 < float(left) <= 30
    assert float(bar) == pytest.approx(float(left) / 0.3, abs=0.5)
    assert "owner of a" in page
    assert "&quot;note&quot;: &quot;&lt;b&gt;&quot;" in page


@pytest.mark.parametrize("step", ["release", "history"])
def test_a_lock_that_is_not_held_any_more_redirects_to_what_is_known_of_it(admin_client, step):
    response = admin_client.get(page_of("gone", step=step), follow=True)
    page = LIST if step == "release" else page_of("gone")
    assert response.redirect_chain == [(page, 302)]
    assert messages_on(response) == ["The lock “gone” is not held any more."]


def test_an_alias_that_does_not_answer_is_asked_only_once(admin_client, settings):
    """Each call to a dead server takes its whole command timeout."""
    use(settings, default=f"{__name__}.DownBackend")
    DownBackend.asked = 0
    admin_client.get(LIST)
    assert DownBackend.asked == 1


@pytest.mark.parametrize("step", ["release", "history"])
def test_an_alias_that_does_not_answer_is_named_on_every_page(admin_client, settings, step):
    use(settings, default=f"{__name__}.DownBackend")
    response = admin_client.get(page_of("a", step=step), follow=True)
    page = LIST if step == "release" else page_of("a")
    assert response.redirect_chain == [(page, 302)]
    assert "nobody answers" in messages_on(response)[0]


def test_the_user_of_a_request_is_shown_only_to_those_who_may_see_users():
    hold("a", metadata='{"path": "/pay/", "user": "grace"}')
    for url in (LIST, page_of("a")):
        assert b"grace" not in visitor("view_heldlock").get(url).content
        assert b"grace" in visitor("view_heldlock", "view_user").get(url).content


# -- the release --------------------------------------------------------------------------


def test_each_release_link_names_its_lock_and_is_escaped(operator):
    hold('order:"><script>')
    page = operator.get(LIST).content.decode()
    assert 'aria-label="Release the lock “order:&quot;&gt;&lt;script&gt;”"' in page
    assert "<script>order" not in page
    assert '"><script>' not in page


def test_opening_the_confirmation_changes_nothing(operator):
    hold("a")
    say_goodbye()
    assert operator.get(page_of("a", step="release")).status_code == 200
    assert (
        operator.get(page_of("a", step="release") + "?owner=owner+of+a&force=on").status_code == 200
    )
    assert locks["default"].get("a") is not None
    assert not LogEntry.objects.exists()


def test_a_dead_holders_lock_is_released_and_logged(operator):
    lease = hold("a", metadata='{"task_name": "shop.charge", "user": "ada"}')
    say_goodbye()
    response = release(operator, "a")
    assert messages_on(response) == ["The lock “a” of alias “default” was released."]
    assert locks["default"].get("a") is None
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.object_repr) == (
        operator.user,
        "default/a",
        "default/a",
    )
    assert "owner of a" in entry.change_message
    event = LockEvent.objects.get(name="a")
    assert (event.event, event.name, event.alias, event.reason) == (
        "broken",
        "a",
        "default",
        "operator",
    )
    assert (event.owner, event.token) == ("owner of a", lease.token)
    assert event.user == operator.user.username
    assert event.detail["task_name"] == "shop.charge"
    assert "user" not in event.detail


def test_a_live_holders_lock_is_released_only_by_force(operator):
    hold("a")
    page = operator.get(page_of("a", step="release")).content.decode()
    assert 'name="force"' in page
    refused = release(operator, "a")
    assert refused.status_code == 200
    page = refused.content.decode()
    assert "Its holder may still be running" in page
    assert "Release it anyway" in page
    assert locks["default"].get("a") is not None
    assert not LockEvent.objects.filter(name="a").exists()
    assert "Its holder continues" in messages_on(release(operator, "a", force=True))[0]
    assert locks["default"].get("a") is None


def test_a_parked_lease_is_released_only_by_force(operator):
    hold("a", kind="parked")
    release(operator, "a")
    assert locks["default"].get("a") is not None
    release(operator, "a", force=True)
    assert locks["default"].get("a") is None


def test_a_lock_with_another_owner_is_not_released(operator):
    hold("a", owner="the next one")
    response = release(operator, "a", force=True)
    assert messages_on(response) == ["The lock “a” now has another owner. It was not released."]
    assert locks["default"].get("a").owner == "the next one"
    assert not LogEntry.objects.exists()


def test_a_lock_whose_owner_changes_at_the_last_moment_is_not_logged(operator, settings):
    use(settings, default=f"{__name__}.ChangesHands")
    hold("a")
    response = release(operator, "a", force=True)
    assert "now has another owner" in messages_on(response)[0]
    assert not LogEntry.objects.exists()
    assert not LockEvent.objects.filter(name="a").exists()


def test_a_lock_that_its_holder_releases_at_the_last_moment_is_said_to_be_gone(operator, settings):
    use(settings, default=f"{__name__}.ReleasedMeanwhile")
    hold("a")
    response = release(operator, "a", force=True)
    assert messages_on(response) == ["The lock “a” is not held any more."]
    assert not LogEntry.objects.exists()
    assert not LockEvent.objects.filter(name="a").exists()


def test_of_two_operators_the_second_is_told(operator):
    second = visitor("view_heldlock", "release_heldlock")
    hold("a")
    for client in (operator, second):
        assert client.get(page_of("a", step="release")).status_code == 200
    assert "was released" in messages_on(release(operator, "a", force=True))[0]
    assert messages_on(release(second, "a", force=True)) == ["The lock “a” is not held any more."]
    # The next holder is not the one that the second operator saw.
    hold("a", owner="the next one")
    told = messages_on(release(second, "a", force=True))
    assert told == ["The lock “a” now has another owner. It was not released."]
    assert locks["default"].get("a").owner == "the next one"
    assert LogEntry.objects.count() == 1


def test_a_release_without_an_answer_is_logged_as_uncertain(operator, settings):
    use(settings, default=f"{__name__}.UnansweredBreak")
    hold("a")
    response = release(operator, "a", force=True)
    assert "may or may not have been released" in messages_on(response)[0]
    assert "may or may not" in LogEntry.objects.get().change_message
    assert not LockEvent.objects.filter(name="a").exists()


def test_what_cannot_be_logged_undoes_nothing_that_was(operator, settings, monkeypatch):
    use(settings, default=LOCAL, other=f"{__name__}.UnansweredBreak")
    write = held_locks.log

    def log(request, row, flag, text):
        if text.startswith("No answer"):
            # As Django does after any failed statement.
            transaction.set_rollback(True)
            raise DatabaseError("too long")
        write(request, row, flag, text)

    monkeypatch.setattr(held_locks, "log", log)
    hold("a")
    hold("b", alias="other")
    answers = {"owner": "owner of b", "force": "on"}
    release(operator, "a", force=True)
    told = messages_on(operator.post(page_of("b", "other", "release"), answers, follow=True))
    assert "may or may not have been released" in told[0]
    assert told[1] == "too long"
    # The transaction of the request can still be used, and is committed.
    assert not transaction.get_rollback()
    assert [entry.object_id for entry in LogEntry.objects.all()] == ["default/a"]


def test_a_release_that_cannot_be_logged_is_not_made(operator, monkeypatch):
    def no_table(*_, **__):
        raise DatabaseError("no such table")

    monkeypatch.setattr(held_locks, "log", no_table)
    hold("order:1")
    response = release(operator, "order:1", force=True)
    assert response.status_code == 200
    (message,) = messages_on(response)
    assert "was not released" in message
    assert "migrations" in message
    assert locks["default"].get("order:1") is not None
    assert not LogEntry.objects.exists()


def test_a_release_whose_event_cannot_be_written_is_made_and_logged(operator, monkeypatch):
    def no_table(*_, **__):
        raise DatabaseError("no such table")

    monkeypatch.setattr(audit, "record", no_table)
    hold("order:1")
    made, missing = messages_on(release(operator, "order:1", force=True))
    assert "was released" in made
    assert missing.startswith(
        "Lock events may not have been written: “order:1”. Database 'default'"
    )
    assert missing.endswith("run manage.py migrate django_dlock: no such table")
    assert locks["default"].get("order:1") is None
    assert LogEntry.objects.exists()


def test_a_release_whose_log_entry_is_not_committed_is_said_to_be_made(operator, monkeypatch):
    made = held_locks.break_lease

    def then_the_commit_fails(*args, **kwargs):
        broken = made(*args, **kwargs)
        # As with a deferred constraint, or a connection that breaks.
        raising = mock.Mock(side_effect=InterfaceError("connection already closed"))
        fails = SimpleNamespace(set_rollback=raising)
        monkeypatch.setattr(held_locks, "transaction", fails)
        return broken

    monkeypatch.setattr(held_locks, "break_lease", then_the_commit_fails)
    hold("order:1")
    (message,) = messages_on(release(operator, "order:1", force=True))
    assert "was released, but this may not be logged" in message
    assert locks["default"].get("order:1") is None


def test_a_release_sends_broken(operator, monkeypatch):
    # The loss of another test's lock may be reported now. On SQLite it would wait for this test's
    # transaction, with all other events behind it.
    monkeypatch.setattr(audit, "_try_to_record", lambda *args, **facts: None)
    hold("a")
    sent = []

    def receiver(sender, **facts):
        sent.append((sender.__name__, facts["name"], facts["owner"], facts["reason"]))

    signals.broken.connect(receiver)
    try:
        release(operator, "a", force=True)
        assert dispatch.flush(30)
    finally:
        signals.broken.disconnect(receiver)
    assert sent == [("Lock", "a", "owner of a", "operator")]


def test_a_release_needs_the_csrf_token(operator):
    hold("a")
    client = Client(enforce_csrf_checks=True)
    client.force_login(operator.user)
    assert release(client, "a", force=True, follow=False).status_code == 403
    assert locks["default"].get("a") is not None


@pytest.mark.parametrize("answers", [{}, {"owner": ""}, {"force": "on"}])
def test_a_release_that_names_no_owner_is_refused(operator, answers):
    hold("a")
    assert operator.post(page_of("a", step="release"), answers).status_code == 200
    assert locks["default"].get("a") is not None


# -- the release of several ---------------------------------------------------------------


def select(client, *names, owners=(), force=False, alias="default"):
    """Confirms with ``owners``; without them, the page asks for confirmation."""
    answers = {
        "action": "release_selected",
        "_selected_action": [f"{alias}/{name}" for name in names],
        "owner": list(owners),
        **({"force": "on"} if force else {}),
    }
    return client.post(LIST, answers, follow=True)


def test_several_locks_are_confirmed_on_one_page_and_logged(operator):
    names = ["a", "b/c", "d <i>"]
    for name in names:
        hold(name)
    say_goodbye()
    assert len(re.findall('name="_selected_action"', operator.get(LIST).content.decode())) == 3
    response = select(operator, *names)
    assert response.redirect_chain == []
    page = response.content.decode()
    for fact in ("owner of a", "owner of b/c", "d &lt;i&gt;", "Release these 3 locks?"):
        assert fact in page
    assert page.count("Nothing is running under this lock.") == 3
    assert 'name="force"' not in page
    assert locks["default"].count() == 3, "nothing is done before the confirmation"
    response = select(operator, *names, owners=[f"owner of {name}" for name in names])
    assert response.redirect_chain == [(LIST, 302)]
    assert messages_on(response) == [
        f"The lock “{name}” of alias “default” was released." for name in names
    ]
    assert locks["default"].count() == 0
    assert sorted(LogEntry.objects.values_list("object_id", flat=True)) == [
        f"default/{name}" for name in names
    ]
    assert sorted(LockEvent.objects.filter(event="broken").values_list("name", flat=True)) == names


def test_the_result_is_shown_for_each_of_several_locks(operator):
    hold("cooling", kind="cooling")
    hold("alive")
    hold("changed", owner="the next one")
    names = ["cooling", "alive", "changed", "gone"]
    owners = [f"owner of {name}" for name in names]
    response = select(operator, *names, owners=owners)
    assert messages_on(response) == [
        "The lock “gone” is not held any more.",
        "The lock “cooling” of alias “default” was released.",
        "The lock “changed” now has another owner. It was not released.",
    ]
    page = response.content.decode()
    assert "Its holder may still be running" in page
    assert 'value="owner of alive"' in page, "a lock that needs force is shown again"
    assert 'value="owner of cooling"' not in page
    assert [info.name for info in locks["default"].list()] == ["alive", "changed"]
    response = select(operator, "alive", owners=["owner of alive"], force=True)
    assert "was released" in messages_on(response)[0]
    assert [info.name for info in locks["default"].list()] == ["changed"]


def test_locks_of_every_alias_can_be_selected_even_if_one_alias_does_not_answer(operator, settings):
    use(settings, default=f"{__name__}.DownBackend", spare=LOCAL)
    hold("a", "spare")
    chosen = ["default/x", "default/y", "spare/a", "nowhere/z"]
    response = operator.post(
        LIST, {"action": "release_selected", "_selected_action": chosen, "index": "0"}
    )
    told = messages_on(response)
    assert len(told) == 2
    assert "nobody answers" in told[0]
    assert "nowhere" in told[1]
    assert re.findall(r'name="_selected_action" value="(.*?)"', response.content.decode()) == [
        "spare/a"
    ]


def test_the_question_names_each_of_several_locks(operator):
    for name in ("a", "b\u202ec"):
        hold(name)
    chosen = ["default/a", "default/b\u202ec"]
    response = operator.post(
        LIST, {"action": "release_selected", "_selected_action": chosen, "index": "0"}
    )
    page = response.content.decode()
    assert "Release these 2 locks?" in page
    assert re.findall("<strong><bdi>(.*?)</bdi></strong>", page) == ["a", r"b\u202ec"]


def test_after_an_alias_stops_answering_no_further_release_is_sent(operator, settings):
    use(settings, default=f"{__name__}.UnansweredBreak")
    hold("a")
    hold("b")
    response = select(operator, "a", "b", owners=["owner of a", "owner of b"], force=True)
    assert len(messages_on(response)) == 1
    assert locks["default"].get("b") is not None
    assert 'value="owner of b"' in response.content.decode()


def test_selecting_all_pages_selects_only_the_visible_rows(operator):
    hold("a")
    hold("b")
    answers = {"action": "release_selected", "_selected_action": "default/a", "select_across": "1"}
    page = operator.post(LIST, {**answers, "index": "0"}).content.decode()
    assert "default/a" in page
    assert "default/b" not in page


def test_actions_of_the_whole_site_are_not_offered_for_locks(operator):
    def export(modeladmin, request, queryset):
        raise AssertionError

    hold("a")
    admin.site.add_action(export)
    try:
        assert b'value="export"' not in operator.get(LIST).content
    finally:
        admin.site.disable_action("export")
        del admin.site._global_actions["export"]


# -- permissions --------------------------------------------------------------------------


def statuses(client):
    """The status codes of the list, one lock, the confirmation and the release."""
    hold("a")
    answers = (
        client.get(LIST),
        client.get(page_of("a")),
        client.get(page_of("a", step="release")),
        release(client, "a", force=True, follow=False),
    )
    released = locks["default"].get("a") is None
    return [answer.status_code for answer in answers], released


def test_an_anonymous_visitor_is_sent_to_the_login():
    client = Client()
    assert statuses(client) == ([302, 302, 302, 302], False)
    assert client.get(LIST)["Location"].startswith("/admin/login/")


def test_a_user_who_is_not_staff_is_sent_to_the_login():
    client = visitor("view_heldlock", "release_heldlock", staff=False)
    assert statuses(client) == ([302, 302, 302, 302], False)


def test_staff_without_permission_see_nothing():
    client = visitor()
    assert statuses(client) == ([403, 403, 403, 403], False)
    # Nor do they learn which locks exist.
    assert client.get(page_of("no such lock")).status_code == 403
    assert b"Held locks" not in client.get("/admin/").content


def test_the_permission_to_view_does_not_allow_a_release():
    client = visitor("view_heldlock")
    assert statuses(client) == ([200, 200, 403, 403], False)
    assert b"/release/" not in client.get(LIST).content
    assert b"/release/" not in client.get(page_of("a")).content
    assert b"_selected_action" not in client.get(LIST).content
    select(client, "a", owners=["owner of a"], force=True)
    assert locks["default"].get("a") is not None


@pytest.mark.parametrize("method", ["get", "head", "post", "put", "patch", "delete", "options"])
@pytest.mark.parametrize("permissions", [("view_heldlock",), ("release_heldlock",), ()])
def test_no_address_and_no_method_releases_a_lock_without_the_permission(permissions, method):
    client = visitor(*permissions)
    hold("a")
    say_goodbye()
    forms = (
        {"owner": "owner of a", "force": "on"},
        {
            "action": "release_selected",
            "_selected_action": "default/a",
            "owner": "owner of a",
            "force": "on",
            "index": "0",
        },
        {"post": "yes", "_save": "1"},
    )
    steps = ("change", "release", "delete", "history")
    addresses = [LIST, LIST + "add/", *(page_of("a", step=step) for step in steps)]
    for address in addresses:
        for form in forms:
            getattr(client, method)(address, form)
            getattr(client, method)(f"{address}?action=release_selected&force=on")
    assert locks["default"].get("a").owner == "owner of a"
    assert not LogEntry.objects.exists()


def test_the_permission_to_release_alone_allows_nothing():
    assert statuses(visitor("release_heldlock")) == ([403, 403, 403, 403], False)


def test_the_permissions_to_view_and_release_allow_both():
    client = visitor("view_heldlock", "release_heldlock")
    hold("b")
    assert b"/release/" in client.get(LIST).content
    assert statuses(client) == ([200, 200, 200, 302], True)


def test_the_superuser_may_do_everything(admin_client):
    assert statuses(admin_client) == ([200, 200, 200, 302], True)


def test_nobody_adds_changes_or_deletes_a_held_lock(admin_client):
    hold("a")
    assert admin_client.get(LIST + "add/").status_code == 403
    assert admin_client.post(page_of("a"), {}).status_code == 403
    assert admin_client.post(page_of("a", step="delete"), {"post": "yes"}).status_code == 403
    assert admin_client.get(page_of("gone", step="delete")).status_code == 403
    assert locks["default"].get("a") is not None


def test_the_log_entry_leads_to_the_lock(operator, admin_client):
    hold("a/b")
    release(operator, "a/b", force=True)
    hold("a/b", owner="the next one")
    url = LogEntry.objects.get().get_admin_url()
    assert admin_client.get(url).context["original"].info.name == "a/b"
