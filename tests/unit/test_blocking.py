"""Who blocks whom: chains and deadlocks, found from what waiters say they hold."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from hashlib import sha256

import pytest

from django_dlock import Lock, locks
from django_dlock.backends.base import BaseLockBackend
from django_dlock.exceptions import BackendUnavailable
from django_dlock.lease import HOLDING, LeaseInfo, LeaseQuery, LeaseRequest, Waiter
from django_dlock.lease_info import LeasePage
from django_dlock.operators.blocking import Blocking, survey
from django_dlock.operators.inspection import AliasQuery
from django_dlock.testing import local_locks

NOW = dt.datetime(2026, 11, 1, tzinfo=dt.timezone.utc)


def owner_of(name, alias="default"):
    return sha256(f"{alias}/{name}".encode()).hexdigest()[:32]


def held(name, alias="default", waiting=0, kind="held"):
    return LeaseInfo(
        name, alias, kind, owner_of(name, alias), 1, NOW, 1.0, 30.0, 0, waiting, None, "alive"
    )


def waiter(lock, holds=(), state="alive", number=0):
    alias, name = lock
    holding = " ".join(owner_of(held_name, held_alias)[:16] for held_alias, held_name in holds)
    metadata = {HOLDING: holding} if holding else {}
    return Waiter(name, alias, f"w{number}", NOW, 1.0, None, state, metadata)


def blocking(edges, extra=()):
    """From ``"a<b"``: the holder of b waits for a; ``"a<"``: somebody who holds nothing does."""
    waiters, names = {}, {}
    for edge in edges:
        name, _, holds = edge.partition("<")
        waiting = waiters.setdefault(("default", name), [])
        held_places = [("default", it) for it in holds.split(",") if it]
        waiting.append(waiter(("default", name), held_places, number=len(waiting)))
        names.update(dict.fromkeys([name, *(it for _, it in held_places)]))
    for lock, found in extra:
        waiters.setdefault(lock, []).extend(found)
    infos = [held(name, waiting=len(waiters.get(("default", name), ()))) for name in names]
    return Blocking(infos, waiters)


def shown(found):
    """The lines as text: ``*`` marks a deadlock, ``^`` a lock whose waiters are elsewhere."""
    return [
        " " * line.depth
        + (line.waiter.owner if line.waiter else line.lock[1])
        + "*" * line.in_deadlock
        + "^" * line.repeated
        for line in found.lines()
    ]


def test_a_chain_begins_with_the_lock_that_blocks_all_others():
    found = blocking(["b<c", "a<b", "a<", "c<"])
    assert shown(found) == ["a", " w0", "  b", "   w0", "    c", "     w0", " w1"]
    assert found.deadlocks == []
    assert [it.name for it in found.chain(("default", "c"))] == ["b", "a"]
    assert found.chain(("default", "a")) == []


def test_two_who_wait_for_each_other_are_a_deadlock():
    found = blocking(["a<b", "b<a", "a<"])
    assert found.deadlocks == [[("default", "b"), ("default", "a")]]
    assert shown(found) == ["b*", " w0*", "  a*", "   w0*", "    b*^", "   w1"]
    assert [it.name for it in found.chain(("default", "a"))] == ["b", "a"]


def test_a_deadlock_of_many_and_those_who_wait_behind_it():
    size = 3000
    edges = [f"n{number}<n{(number + 1) % size}" for number in range(size)]
    found = blocking([*edges, "n7<outside", "outside<"])
    (circle,) = found.deadlocks
    assert sorted(circle) == sorted(("default", f"n{number}") for number in range(size))
    following = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
    assert all(
        [(it.alias, it.name) for it in found.waits_for(lock)] == [after]
        for lock, after in following.items()
    )
    lines = found.lines()
    assert len({line.lock for line in lines}) == size + 1
    assert [line.in_deadlock for line in lines if line.lock[1] == "outside"] == [False, False]


def test_a_chain_that_ends_in_a_deadlock_is_followed_once_around():
    found = blocking(["a<b", "b<a", "a<behind"])
    assert [it.name for it in found.chain(("default", "behind"))] == ["a", "b", "a"]
    assert len(found.deadlocks) == 1


def test_a_long_chain_without_a_circle_is_no_deadlock():
    found = blocking([f"n{number}<n{number + 1}" for number in range(3000)])
    assert found.deadlocks == []
    assert len(found.chain(("default", "n3000"))) == 3000
    assert found.lines()[-1].depth == 6000


def test_a_waiter_for_a_lock_that_it_holds_itself_is_a_deadlock():
    assert blocking(["a<a"]).deadlocks == [[("default", "a")]]


def test_several_waiters_of_one_lock_keep_their_order():
    found = blocking(["a<", "a<b,c", "a<d", "c<", "d<e"])
    assert shown(found) == [
        "a",
        " w0",
        " w1",
        "  b",
        "  c",
        "   w0",
        " w2",
        "  d",
        "   w0",
        "    e",
    ]


def test_two_deadlocks_are_told_apart():
    found = blocking(["a<b", "b<a", "c<d", "d<c"])
    assert sorted(sorted(name for _, name in circle) for circle in found.deadlocks) == [
        ["a", "b"],
        ["c", "d"],
    ]


def test_a_circle_may_lead_through_several_aliases():
    one, two = ("default", "a"), ("billing", "a")
    infos = [held("a", "default", 1), held("a", "billing", 1)]
    found = Blocking(infos, {one: [waiter(one, [two])], two: [waiter(two, [one])]})
    assert [set(circle) for circle in found.deadlocks] == [{one, two}]


def test_the_dead_wait_for_nothing():
    one, two = ("default", "a"), ("default", "b")
    infos = [held("a", waiting=1), held("b", waiting=1)]
    waiters = {one: [waiter(one, [two], "dead")], two: [waiter(two, [one])]}
    found = Blocking(infos, waiters)
    assert found.deadlocks == []
    assert found.waits_for(two) == []
    assert [line.waiter.state for line in found.lines() if line.waiter] == ["alive", "dead"]


def test_a_lease_whose_holder_is_dead_is_in_no_deadlock():
    one, two = ("default", "a"), ("default", "b")
    infos = [replace(held("a", waiting=1), holder_state="dead"), held("b", waiting=1)]
    found = Blocking(infos, {one: [waiter(one, [two])], two: [waiter(two, [one])]})
    assert found.deadlocks == []
    assert found.chain(two) == [found.waiters[one][0]]


def test_a_lease_that_changed_hands_is_not_the_waiters_any_more():
    lock = ("default", "a")
    old = Waiter("a", "default", "w", NOW, 1.0, None, "alive", {HOLDING: "0123456789abcdef 7"})
    found = Blocking([held("a"), held("b")], {lock: [old]})
    assert found.held_by(old) == []
    assert shown(found) == ["a", " w"]


@pytest.mark.parametrize("value", [None, 7, ["x"], "", {}])
def test_odd_metadata_names_no_lease(value):
    odd = Waiter("a", "default", "w", NOW, 1.0, None, "alive", {HOLDING: value})
    assert odd.holding == ()


def test_a_name_that_nobody_holds_is_shown_with_its_waiters():
    lock = ("default", "free")
    found = Blocking([], {lock: [waiter(lock)]})
    assert [line.lease for line in found.lines()] == [None, None]


def test_a_survey_follows_real_waiters_over_aliases(settings):
    backend = "django_dlock.backends.local.LocalBackend"
    settings.DLOCKS = {"default": {"BACKEND": backend}, "billing": {"BACKEND": backend}}
    with local_locks():
        with Lock("a") as first, Lock("b", using="billing"):
            queue_up("billing", "b", holding=first.owner)
            queue_up("default", "a")
            query = AliasQuery(["default", "billing"])
            found = survey(query)
        assert query.problems == {}
        assert found.names_read == 2
        assert found.is_complete
        # The thread that holds both is not the one that waits, so there is no circle.
        assert [line.lock for line in found.blocking.lines()] == [
            ("billing", "b"),
            ("billing", "b"),
            ("default", "a"),
            ("default", "a"),
        ]


def queue_up(alias, name, holding=""):
    store = locks[alias]
    metadata = f'{{"{HOLDING}": "{holding[:16]}"}}' if holding else "{}"
    number = len(store.waiters(name, limit=10**6))
    request = LeaseRequest(name, f"w{number}", 30.0, metadata=metadata, waits=True)
    store.acquire(request, deadline=store.call_deadline())


def test_a_survey_whose_only_lease_ends_after_it_was_counted_is_not_complete(monkeypatch):
    with local_locks():
        monkeypatch.setattr(
            type(locks["default"]), "page", lambda *args, **kwargs: LeasePage([], total=1)
        )
        found = survey(AliasQuery(["default"]))
    assert (found.names_read, found.is_complete) == (0, False)


def test_a_store_that_cannot_tell_who_waits_says_so(monkeypatch):
    with local_locks(), Lock("busy"):
        queue_up("default", "busy")
        monkeypatch.setattr(type(locks["default"]), "waiters", BaseLockBackend.waiters)
        query = AliasQuery(["default"])
        assert not survey(query).is_complete
        assert query.problems == {"default": "Alias 'default' cannot tell who waits for a lock."}


def test_a_survey_reads_the_names_that_most_wait_for_and_says_what_is_missing(monkeypatch):
    with local_locks(), Lock("quiet"), Lock("busy"), Lock("busier"):
        for _ in range(3):
            queue_up("default", "busier")
        queue_up("default", "busy")
        found = survey(AliasQuery(["default"]), names=1)
        assert [line.lock[1] for line in found.blocking.lines() if not line.waiter] == ["busier"]
        assert not found.is_complete
        found = survey(AliasQuery(["default"]), waiters=2)
        (line,) = [line for line in found.blocking.lines() if line.lock[1] == "busier"][:1]
        assert line.more == 1
        assert not found.is_complete
        found = survey(AliasQuery(["default"]), seconds=0)
        assert (found.names_read, found.is_complete) == (0, False)
        assert survey(AliasQuery(["default"]), names=2).is_complete is False
        assert survey(AliasQuery(["default"]), names=3).is_complete

        def away(name, limit):
            raise BackendUnavailable("nobody answers", name, "default")

        monkeypatch.setattr(locks["default"], "waiters", away)
        query = AliasQuery(["default"])
        assert not survey(query).is_complete
        assert "nobody answers" in query.problems["default"]


def test_waiters_who_have_gone_since_they_were_counted_are_not_missing(monkeypatch):
    with local_locks(), Lock("a"):
        queue_up("default", "a")
        monkeypatch.setattr(locks["default"], "waiters", lambda name, limit: [])
        assert survey(AliasQuery(["default"])).is_complete


def test_a_survey_of_locks_that_were_read_asks_only_for_their_waiters(monkeypatch):
    with local_locks(), Lock("a"), Lock("b"):
        queue_up("default", "a")
        everything = locks["default"].page(LeaseQuery())
        idle = LeasePage([info for info in everything.infos if not info.waiting], 1)
        monkeypatch.setattr(locks["default"], "page", None)
        found = survey(AliasQuery(["default"]), pages={"default": everything})
        assert (found.names_read, found.is_complete) == (1, True)
        monkeypatch.setattr(locks["default"], "waiters", None)
        found = survey(AliasQuery(["default"]), pages={"default": idle})
        assert (found.names_read, found.is_complete) == (0, True)
