"""What is wrong at first sight on the page of held locks: counts, deadlocks, and their order."""

from __future__ import annotations

import dataclasses
import re
from html import unescape

import pytest
from django.urls import reverse
from django.utils import timezone

from django_dlock import locks, process
from django_dlock.admin import overview
from django_dlock.backends.local import LocalBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import HOLDING, OWNER_PART, Lease, LeaseRequest
from django_dlock.models import IdempotencyRecord, LockEvent

LOCAL = "django_dlock.backends.local.LocalBackend"
POSED = f"{__name__}.PosedBackend"
LIST = "/admin/django_dlock/heldlock/"

pytestmark = pytest.mark.django_db


class PosedBackend(LocalBackend):
    """The end of a name says what is wrong with its lock; counts what is asked."""

    asked: list[tuple[str, str]]

    def page(self, query, *, offset=0, limit=None):
        ASKED.append((self.alias, f"page {limit}"))
        return super().page(query, offset=offset, limit=limit)

    def waiters(self, name, *, limit=100):
        ASKED.append((self.alias, f"waiters {name}"))
        return super().waiters(name, limit=limit)

    def _info(self, name, entry, now):
        info = super()._info(name, entry, now)
        facts = {
            "dead": {"holder_state": "dead"},
            "silent": {"holder_state": "silent"},
            "late": {"ttl": 5.0, "granted_ttl": 30.0, "renewals": 1},
            "damaged": {"damaged": ("kind",)},
            "unknown": {"holder_state": "unknown"},
        }
        return dataclasses.replace(info, **facts.get(name.partition(" ")[2], {}))


class DownBackend(LocalBackend):
    """An alias that does not answer."""

    def page(self, query, **_):
        ASKED.append((self.alias, "page"))
        raise BackendUnavailable("nobody answers", "", self.alias)


class LosesWaiters(PosedBackend):
    """An alias that does not answer any more when it is asked for waiters."""

    def waiters(self, name, *, limit=100):
        super().waiters(name, limit=limit)
        raise BackendUnavailable("nobody answers", name, self.alias)


class UntoldBackend(PosedBackend):
    """A store that does not know who waits, such as etcd."""

    def _info(self, name, entry, now):
        info = super()._info(name, entry, now)
        return dataclasses.replace(info, waiting=0, unknown=("waiting",))

    def waiters(self, name, *, limit=100):
        raise NotImplementedError


ASKED: list[tuple[str, str]] = []


@pytest.fixture(autouse=True)
def aliases(settings):
    # Loads the project's views, which are made with the aliases of the project.
    reverse("admin:index")
    use(settings, default=POSED)
    yield
    locks.reset()
    ASKED.clear()


def use(settings, **backends):
    settings.DLOCKS = {alias: {"BACKEND": backend} for alias, backend in backends.items()}
    locks.reset()


def hold(name, alias="default", **facts):
    backend = locks[alias]
    request = LeaseRequest(name=name, owner=owner_of(name, alias), ttl=30, **facts)
    assert isinstance(backend.acquire(request, deadline=backend.call_deadline()), Lease)


def owner_of(name, alias="default"):
    return f"{alias}/{name}".ljust(OWNER_PART, "x")[::-1]


def wait_for(name, holding=(), alias="default", number=0):
    """Wait for a lock, as the holder of others, each an alias and a name."""
    backend = locks[alias]
    holds = " ".join(owner_of(held, held_alias)[:OWNER_PART] for held_alias, held in holding)
    metadata = f'{{"{HOLDING}": "{holds}"}}' if holds else "{}"
    waiter = LeaseRequest(f"{name}", f"waiter {number} {name}", 30, metadata=metadata, waits=True)
    assert not isinstance(backend.acquire(waiter, deadline=backend.call_deadline()), Lease)


def deadlock(first="a", second="b", others=("default", "default")):
    """Two locks whose holders wait for each other."""
    places = list(zip(others, (first, second), strict=True))
    for alias, name in places:
        hold(name, alias)
    wait_for(first, [places[1]], others[0])
    wait_for(second, [places[0]], others[1])


def tiles(response):
    """The text and the address of each tile."""
    page = response.content.decode()
    found = re.findall(r'<a class="dlock-tile (.*?)" href="(.*?)"(.*?)>(.*?)</a>', page, re.DOTALL)
    return {
        unescape(re.sub(r"<.*?>", "", text)): (style, unescape(href))
        for style, href, _current, text in found
    }


def texts(response):
    return [*tiles(response)]


def note(response):
    found = re.search(r'<p class="dlock-note">(.*?)<a', response.content.decode(), re.DOTALL)
    return unescape(found[1]).strip()


def names_on(response):
    page = re.sub(r' <span class="dlock-alias">.*?</span>', "", response.content.decode())
    cells = re.findall(r'class="field-lock_name">(.*?)</th>', page, re.DOTALL)
    return [unescape(re.sub(r"<.*?>", "", cell)) for cell in cells]


# -- the counts ---------------------------------------------------------------------------


def test_nothing_wrong_is_said_quietly(admin_client):
    assert texts(admin_client.get(LIST)) == [
        "0 held",
        "0 waited for",
        "0 deadlocks",
        "0 dead",
        "0 silent",
    ]
    hold("a")
    shown = tiles(admin_client.get(LIST))
    assert {style for text, (style, _href) in shown.items()} == {
        "dlock-none",
        "dlock-plain",
    }
    assert shown["1 held"] == ("dlock-plain", "?")
    assert note(admin_client.get(LIST)) == ""


def test_each_count_leads_to_what_it_counts_and_says_what_is_wrong(admin_client, settings):
    use(settings, default=POSED, spare=POSED)
    deadlock("a", "b", ("default", "spare"))
    hold("c dead")
    hold("c dead", "spare")
    hold("d silent")
    hold("e")
    wait_for("e")
    shown = tiles(admin_client.get(LIST, {"q": "nothing like this"}))
    assert {text: style for text, (style, _href) in shown.items()} == {
        "6 held": "dlock-plain",
        "3 waited for": "dlock-plain",
        "1 deadlock holders wait for each other": "dlock-bad",
        "2 dead the process is gone": "dlock-bad",
        "1 silent no sign of life for 15 s": "dlock-warn",
    }
    lists = [sorted(names_on(admin_client.get(LIST + href))) for _style, href in shown.values()]
    assert lists == [
        ["a", "b", "c dead", "c dead", "d silent", "e"],
        ["a", "b", "e"],
        ["a", "b"],
        ["c dead", "c dead"],
        ["d silent"],
    ]


@pytest.mark.parametrize(
    ("query", "current"),
    [("", "?"), ("?p=1", "?"), ("?waiting=yes", "?waiting=yes"), ("?q=a", ""), ("?kind=held", "")],
)
def test_the_tile_of_the_list_that_is_shown_says_so(admin_client, query, current):
    page = admin_client.get(LIST + query).content.decode()
    found = re.findall(r'href="([^"]*)" aria-current="true"><span class="dlock-tile', page)
    assert found == ([current] if current else [])


def test_what_did_not_answer_is_not_counted_as_nothing(admin_client, settings):
    use(settings, default=POSED, away=f"{__name__}.DownBackend")
    hold("a dead")
    response = admin_client.get(LIST)
    assert texts(response) == [
        "at least 1 held",
        "none found waited for",
        "none found deadlocks",
        "at least 1 dead the process is gone",
        "none found silent",
    ]
    assert note(response) == "Alias “away” is not counted."
    # Also if the list itself is complete.
    response = admin_client.get(LIST + "?alias=default")
    assert texts(response)[0] == "at least 1 held"
    assert note(response) == "Alias “away” is not counted."
    assert "did not answer" not in response.content.decode()
    use(settings, away=f"{__name__}.DownBackend")
    assert {text.partition(" ")[0] for text in texts(admin_client.get(LIST))} == {"not"}


def test_waiters_that_a_store_does_not_know_are_not_counted_as_none(admin_client, settings):
    use(settings, default=f"{__name__}.UntoldBackend")
    assert "0 waited for" in texts(admin_client.get(LIST)), "nobody waits for no lock"
    hold("a")
    response = admin_client.get(LIST)
    assert texts(response) == [
        "1 held",
        "not known waited for",
        "not known deadlocks",
        "0 dead",
        "0 silent",
    ]
    assert note(response) == "Alias “default” does not know who waits for its locks."
    settings.DLOCKS = {**settings.DLOCKS, "spare": {"BACKEND": POSED}}
    locks.reset()
    hold("a")
    hold("b", "spare")
    wait_for("b", alias="spare")
    found = texts(admin_client.get(LIST))
    assert found[:3] == ["2 held", "at least 1 waited for", "none found deadlocks"]


def test_counts_of_more_locks_than_are_read_are_the_least(admin_client, monkeypatch):
    monkeypatch.setattr(overview, "READ", 3)
    monkeypatch.setattr("django_dlock.admin.held_locks.HeldLockAdmin.list_per_page", 3)
    for number in range(3):
        hold(f"{number} dead")
    hold("b")
    hold("a silent")
    assert texts(admin_client.get(LIST)) == [
        "5 held",
        "0 waited for",
        "0 deadlocks",
        "at least 3 dead the process is gone",
        "none found silent",
    ]


def test_an_alias_with_very_many_locks_is_not_looked_through(admin_client, monkeypatch):
    monkeypatch.setattr(overview, "MOST", 2)
    for name in ("c", "b dead", "a"):
        hold(name)
    ASKED.clear()
    response = admin_client.get(LIST)
    assert ASKED == [("default", "page 0"), ("default", "page 50")]
    assert names_on(response) == ["c", "b dead", "a"]
    assert texts(response)[:2] == ["3 held", "none found waited for"]
    assert note(response).startswith("Alias “default” has more than 2 locks")


# -- deadlocks ----------------------------------------------------------------------------


def test_the_locks_of_a_deadlock_are_marked_with_a_link_to_its_explanation(admin_client):
    hold("alone")
    deadlock()
    page = admin_client.get(LIST).content.decode()
    marks = re.findall(r'<a class="dlock-deadlock" href="(.*?)"', page)
    assert len(marks) == 2
    assert "These holders wait for each other." in admin_client.get(marks[0]).content.decode()


def test_no_waiters_are_read_if_nobody_waits(admin_client):
    for number in range(3):
        hold(f"lock:{number}")
    ASKED.clear()
    admin_client.get(LIST)
    assert ASKED == [("default", "page 0"), ("default", "page 100")]


def test_waiters_are_read_only_of_locks_that_can_be_in_a_deadlock(admin_client):
    for name in ("a", "b dead", "c", "d"):
        hold(name)
        if name != "d":
            wait_for(name)
    hold("e", kind="parked")
    wait_for("e")
    ASKED.clear()
    admin_client.get(LIST)
    assert ASKED[2:] == [("default", "waiters a"), ("default", "waiters c")]


def test_the_search_for_deadlocks_has_the_limits_of_who_blocks_whom(admin_client, monkeypatch):
    for number in range(130):
        hold(f"lock:{number}")
        wait_for(f"lock:{number}")
    ASKED.clear()
    response = admin_client.get(LIST)
    assert [what for _alias, what in ASKED[:3]] == ["page 0", "page 100", "page 100"]
    assert len(ASKED) == 3 + 100
    assert texts(response)[1:3] == ["130 waited for", "none found deadlocks"]
    assert note(response) == "Not all waiters were read, so a deadlock may be missing."
    assert admin_client.get(LIST + "?waiting=yes").context["cl"].result_count == 130
    # A store so slow that the time is over after the first answer.
    moments = iter([0.0, 1.0])
    clock = type("Clock", (), {"now": staticmethod(lambda: next(moments, 99.0))})
    monkeypatch.setattr("django_dlock.operators.blocking.clock", clock)
    ASKED.clear()
    admin_client.get(LIST)
    assert len(ASKED) == 3 + 1


def test_an_alias_that_is_silent_is_asked_once(admin_client, settings):
    use(settings, away=f"{__name__}.DownBackend", default=POSED)
    deadlock()
    for query in ("", "?o=1", "?waiting=yes", "?alias=default&p=2"):
        ASKED.clear()
        admin_client.get(LIST + query)
        assert [alias for alias, _what in ASKED].count("away") == 1


def test_an_alias_that_falls_silent_between_two_questions_is_not_asked_again(
    admin_client, settings
):
    use(settings, default=f"{__name__}.LosesWaiters", spare=POSED)
    deadlock()
    hold("c", "spare")
    ASKED.clear()
    response = admin_client.get(LIST + "?o=1")
    assert [what for alias, what in ASKED if alias == "default"] == [
        "page 0",
        "page 100",
        "waiters a",
    ]
    assert names_on(response) == ["c"]
    assert "Alias “default” did not answer" in unescape(response.content.decode())
    assert texts(response)[0] == "at least 1 held"


# -- the order ----------------------------------------------------------------------------


@pytest.fixture
def in_trouble():
    """Locks in the opposite of the order in which they are shown, but for their age."""
    for name in ("j", "k", "h", "g unknown", "f late", "e silent", "d dead", "c damaged"):
        hold(name)
    for name in ("h", "g unknown"):
        wait_for(name)
    deadlock("b", "a")
    return ["b", "a", "c damaged", "d dead", "e silent", "f late", "g unknown", "h", "j", "k"]


def test_what_is_wrong_comes_first_and_then_the_oldest(admin_client, in_trouble):
    assert names_on(admin_client.get(LIST)) == in_trouble
    # A click on a column sorts by nothing else.
    assert names_on(admin_client.get(LIST + "?o=1")) == sorted(in_trouble)
    assert names_on(admin_client.get(LIST + "?o=-1")) == sorted(in_trouble, reverse=True)
    page = admin_client.get(LIST + "?o=1").content.decode()
    assert page.count("dlock-deadlock") == 2


def test_what_is_wrong_comes_first_over_all_pages(admin_client, in_trouble, monkeypatch):
    monkeypatch.setattr("django_dlock.admin.held_locks.HeldLockAdmin.list_per_page", 3)
    pages = [names_on(admin_client.get(f"{LIST}?p={number}")) for number in (1, 2, 3, 4)]
    assert [len(page) for page in pages] == [3, 3, 3, 1]
    assert [name for page in pages for name in page] == in_trouble
    # Without the locks in the deadlock.
    monkeypatch.setattr(overview, "READ", 4)
    pages = [names_on(admin_client.get(f"{LIST}?p={number}")) for number in (1, 2, 3, 4)]
    assert [name for page in pages for name in page] == in_trouble
    assert names_on(admin_client.get(LIST + "?q=a")) == ["a", "c damaged", "d dead"]


def test_the_locks_in_deadlocks_have_pages_too(admin_client, monkeypatch):
    monkeypatch.setattr("django_dlock.admin.held_locks.HeldLockAdmin.list_per_page", 3)
    deadlock()
    deadlock("c", "d")
    found = [names_on(admin_client.get(f"{LIST}?waiting=deadlock&p={page}")) for page in (1, 2, 9)]
    assert found == [["a", "b", "c"], ["d"], ["d"]]
    assert len(names_on(admin_client.get(LIST + "?waiting=deadlock&all="))) == 4
    assert names_on(admin_client.get(LIST + "?waiting=deadlock&o=-1")) == ["d", "c", "b"]
    assert names_on(admin_client.get(LIST + "?waiting=deadlock&prefix=c")) == ["c"]


def test_an_unknown_choice_of_waiting_redirects_to_the_list(admin_client):
    assert admin_client.get(LIST + "?waiting=no").url == f"{LIST}?e=1"


# -- what a list of one alias leaves out --------------------------------------------------


def test_the_alias_is_shown_only_where_there_are_two(admin_client, settings):
    hold("a")
    page = admin_client.get(LIST).content.decode()
    assert "dlock-alias" not in page
    assert "?alias=" not in page
    use(settings, default=POSED, spare=POSED)
    hold("a")
    page = admin_client.get(LIST).content.decode()
    assert '<span class="dlock-alias">default</span>' in page
    assert "?alias=spare" in page


def test_events_and_records_name_the_alias_only_where_there_are_two(admin_client, settings):
    now = timezone.now()
    LockEvent.objects.create(when=now, event="lost", alias="default", name="a")
    record = IdempotencyRecord.objects.create(
        digest=IdempotencyRecord.digest_of("s", "k"),
        scope="s",
        key="k",
        state="running",
        attempt=1,
        owner="o",
        **dict.fromkeys(("created_at", "started_at", "expires_at"), now),
        lock_alias="default",
        lock_name="a",
    )
    events = "/admin/django_dlock/lockevent/"
    run = f"/admin/django_dlock/idempotencyrecord/{record.pk}/change/"
    page = admin_client.get(events).content.decode()
    assert "dlock-alias" not in page
    assert "alias=" not in page
    assert "alias default" not in admin_client.get(run).content.decode()
    # The links to the events of a lock name it, and it must filter.
    response = admin_client.get(events + "?alias=gone")
    assert list(response.context["cl"].result_list) == []
    use(settings, default=POSED, spare=POSED)
    assert "dlock-alias" in admin_client.get(events).content.decode()
    assert "alias default" in admin_client.get(run).content.decode()
    LockEvent.objects.create(when=now, event="lost", alias="spare", name="a")
    page = admin_client.get(events).content.decode()
    assert "?alias=spare" in page


def test_an_alias_that_no_longer_exists_has_no_locks(admin_client):
    hold("a")
    response = admin_client.get(LIST + "?alias=gone")
    assert names_on(response) == []
    assert "Clear all filters" in response.content.decode()


def test_a_kind_is_shown_only_where_it_is_not_held(admin_client):
    hold("a")
    hold("b", kind="parked")
    page = admin_client.get(LIST).content.decode()
    assert '<span class="dlock-badge dlock-plain">parked</span>' in page
    assert '">held</span>' not in page.replace('<span class="dlock-tile-name">held</span>', "")
    assert '">unknown</span>' not in page


def test_a_process_that_ended_is_dead(admin_client):
    hold("a")
    locks["default"].deregister(process.current().id, deadline=1e9)
    assert "1 dead the process is gone" in texts(admin_client.get(LIST))
