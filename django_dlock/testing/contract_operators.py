"""The rules for what operators see and do: single leases, lists and breaks."""

from __future__ import annotations

import json
from typing import Any

from ..backends.base import BaseLockBackend
from ..lease import SORT_KEYS, Kind, LeaseQuery, Waiter, in_order
from ..process import current
from .tools import ContractTools

__all__ = ["OperatorContract"]


class OperatorContract(ContractTools):
    """A part of ``BackendContract``."""

    def test_what_is_known_of_a_name_is_told(self, backend: BaseLockBackend) -> None:
        """On every store: the backend makes a ``LeaseInfo`` of what its store keeps."""
        name = self.name()
        assert backend.get(name) is None
        lease = self.grant(backend, self.request(name, metadata='{"task_name": "shop.charge"}'))
        info = backend.get(name)
        assert info is not None
        assert (info.name, info.alias, info.kind) == (name, backend.alias, "held")
        assert (info.owner, info.token) == (lease.owner, lease.token)
        assert info.metadata == {"task_name": "shop.charge"}
        assert info.ttl is not None
        assert 0 < info.ttl <= 30.1
        self.release(backend, lease)
        assert backend.get(name) is None

    def test_many_names_are_told_at_once(self, backend: BaseLockBackend) -> None:
        """On every store: each store has a query of its own for many names."""
        base = self.name()
        held = [f"{base}:{letter}" for letter in "ab"]
        for name in held:
            self.grant(backend, self.request(name))
        assert backend.get_many([]) == {}
        found = backend.get_many([*held, f"{base}:free"])
        assert sorted(found) == held
        for name, info in found.items():
            one = backend.get(name)
            assert one is not None
            assert (info.name, info.owner, info.token) == (name, one.owner, one.token)

    def test_a_lease_is_told_in_full(self, backend: BaseLockBackend) -> None:
        """On every store: what it does not know, it must name."""
        self.needs(backend, "listing")
        request = self.request(
            self.name(), metadata=json.dumps({"task_name": "shop.charge", "note": "ü"}), waits=True
        )
        lease = self.grant(backend, request)
        self.renew(backend, lease, ttl=40)
        self.refuse(backend, self.request(request.name, waits=True))
        info = backend.get(request.name)
        assert info is not None
        assert (info.name, info.alias, info.kind) == (request.name, backend.alias, "held")
        assert (info.owner, info.token) == (lease.owner, lease.token)
        assert set(info.unknown) <= {"renewals", "ttl", "waiting"}
        assert info.renewals == (0 if "renewals" in info.unknown else 1)
        assert info.waiting == (0 if "waiting" in info.unknown else 1)
        assert info.ttl is not None
        assert info.ttl <= 41
        assert 0 <= info.age < 30
        assert info.acquired_at.tzinfo is not None
        assert info.process == current()
        assert info.holder_state == "alive"
        assert info.metadata == {"task_name": "shop.charge", "note": "ü"}
        assert backend.list(prefix=request.name)[0].owner == lease.owner

    def test_a_free_name_is_not_listed(self, backend: BaseLockBackend) -> None:
        """On every store: the store's index must forget what was released."""
        self.needs(backend, "listing")
        name = self.name()
        self.release(backend, self.grant(backend, self.request(name)))
        assert backend.list(prefix=name) == []
        assert backend.count(prefix=name) == 0

    def test_what_expired_is_listed_no_more(self, backend: BaseLockBackend) -> None:
        """On every store: the store lists by its own clock."""
        self.needs(backend, "listing")
        lease = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        listed = backend.count(prefix=lease.name) == 1
        # On a machine that stalls, it may have expired by now.
        assert listed or not backend.locked(lease.name, deadline=self.soon(backend))
        self.outlive(backend, lease.name)
        assert backend.list(prefix=lease.name) == []
        assert backend.count(prefix=lease.name) == 0

    def test_lists_are_in_order_of_the_grants_and_paged(self, backend: BaseLockBackend) -> None:
        """On every store: each store has a query of its own for a page and for the count."""
        self.needs(backend, "listing")
        base = self.name()
        names = [f"{base}:{letter}" for letter in "caedb"]
        for name in names:
            self.grant(backend, self.request(name))

        def listed(**kwargs: Any) -> list[str]:
            return [info.name for info in backend.list(prefix=base, **kwargs)]

        assert listed() == names
        assert listed(sort=["age"]) == listed(sort=["-token"]) == names[::-1]
        assert listed(sort=["-age"]) == listed(sort=["token"]) == names
        assert listed(limit=2) == names[:2]
        assert listed(offset=2, limit=2) == names[2:4]
        assert listed(offset=4, limit=9) == names[4:]
        assert listed(offset=9) == []
        assert listed(offset=1, sort=["age"]) == names[-2::-1]
        assert listed(limit=0) == []
        assert backend.count(prefix=base) == 5

    def test_lists_can_be_sorted(self, backend: BaseLockBackend) -> None:
        """On every store: the store sorts, and must agree with Python about each key."""
        self.needs(backend, "listing")
        base = self.name()
        kinds: list[Kind] = ["held", "parked", "held", "reserved", "held"]
        if not {"parking", "reservations"} <= backend.capabilities:
            kinds = ["held"] * len(kinds)
        for number, kind in enumerate(kinds):
            name = f"{base}:{'caedb'[number]}"
            lease = self.grant(backend, self.request(name, ttl=40 - 3 * number, kind=kind))
            for _ in range(3 * number % 5):
                self.renew(backend, lease)
            for _ in range(2 * number % 5):
                self.refuse(backend, self.request(name, waits=True))
        everything = backend.list(prefix=base)
        for key in SORT_KEYS:
            for sort in ([key], ["-" + key], ["kind", "-" + key], ["-holder", key, "name"]):
                names = [info.name for info in in_order(everything, sort)]
                assert [i.name for i in backend.list(prefix=base, sort=sort)] == names, sort
                page = backend.page(LeaseQuery(prefix=base, sort=sort), offset=1, limit=3)
                assert [info.name for info in page.infos] == names[1:4]
                assert page.total == 5

    def test_a_lease_is_as_old_as_its_grant(self, backend: BaseLockBackend) -> None:
        """On every store: the store notes the grant, and not only when the request came."""
        self.needs(backend, "listing")
        first = self.grant(backend, self.request(self.name()))
        waits = self.request(first.name, waits=True)
        self.refuse(backend, waits)
        later = self.grant(backend, self.request(self.name()))
        self.release(backend, first)
        self.acquire_waiting(backend, waits)
        granted, before = backend.get(first.name), backend.get(later.name)
        assert granted is not None
        assert before is not None
        between = (granted.acquired_at - before.acquired_at).total_seconds()
        assert between >= -self.SPREAD

    def test_lists_can_be_filtered(self, backend: BaseLockBackend) -> None:
        """On every store: each store filters in its own query language."""
        self.needs(backend, "listing")
        base, parks = self.name(), "parking" in backend.capabilities
        for letter in "dacb" if parks else "dc":
            kind: Kind = "parked" if letter in "ab" else "held"
            self.grant(backend, self.request(f"{base}:{letter}", kind=kind))

        def listed(**kwargs: Any) -> str:
            return "".join(info.name[-1] for info in backend.list(prefix=base, **kwargs))

        assert listed(kind="held", sort=["name"]) == "cd"
        assert listed(kind="reserved") == ""
        assert listed(holder_state="alive") == "dc"
        assert listed(holder_state="dead") == ""
        assert backend.count(prefix=base, kind="held", holder_state="unknown") == 0
        if not parks:
            assert listed(kind="parked") == ""
            return
        assert listed(kind="parked") == "ab"
        assert listed(holder_state="unknown", sort=["-name"], limit=1) == "b"
        assert backend.count(prefix=base, kind="parked") == 2
        assert backend.count(prefix=base, kind="parked", holder_state="alive") == 0
        assert backend.count(prefix=base, holder_state="unknown") == 2

    def test_a_page_can_have_only_locks_that_somebody_waits_for(
        self, backend: BaseLockBackend
    ) -> None:
        """On every store: each store counts waiters in its own way, or cannot."""
        self.needs(backend, "listing")
        base = self.name()
        for letter in "ab":
            self.grant(backend, self.request(f"{base}:{letter}"))
        self.refuse(backend, self.request(f"{base}:b", waits=True))
        (info,) = backend.list(prefix=f"{base}:b")
        query = LeaseQuery(prefix=base, waiting=True)
        for limit in (None, 2):
            infos, total = backend.page(query, limit=limit)
            assert [each.name for each in infos] == ([info.name] if info.waiting else [])
            assert total == len(infos)

    def test_lists_can_be_filtered_by_host(self, backend: BaseLockBackend) -> None:
        """On every store: the store compares the text, and may ignore case or read wildcards."""
        self.needs(backend, "listing")
        base, host = self.name(), current().host
        self.grant(backend, self.request(f"{base}:{host}"))
        self.grant(backend, self.request(f"{base}:b", metadata=json.dumps({"host": host + "x"})))
        for begin in ("", host[:1], host):
            assert backend.count(prefix=base, host=begin) == 2
        assert len(backend.list(host=host, prefix=base, kind="held", sort=["-name"], limit=1)) == 1
        for other in (host + "x", host[1:], '"' + host, host.swapcase()):
            assert other == host or backend.list(prefix=base, host=other) == [], other

    def test_lists_can_be_filtered_by_task(self, backend: BaseLockBackend) -> None:
        """On every store: the store compares text inside of JSON."""
        self.needs(backend, "listing")
        base = self.name()
        tasks = {"a": "shop.charge", "b": 'shop.ü"/%', "c": "Shop.charge", "d": 7, "e": None}
        for letter, task in tasks.items():
            metadata = {"task_name": task, "note": "shop.other", "shop.note": [1]}
            metadata = {key: fact for key, fact in metadata.items() if fact is not None}
            self.grant(backend, self.request(f"{base}:{letter}", metadata=json.dumps(metadata)))

        def found(task: str, **kwargs: Any) -> str:
            return "".join(i.name[-1] for i in backend.list(prefix=base, task=task, **kwargs))

        assert found("") == "abcde"
        assert found("shop.") == found("shop.", kind="held", contains=base) == "ab"
        assert found("shop.", sort=["-name"], limit=1) == "b"
        assert found("shop.charge") == "a"
        assert found('shop.ü"/') == "b"
        for nothing in ("charge", "shop.other", "shop.note", "shop.charge2", "7", "task_name"):
            assert found(nothing) == "", nothing
        assert backend.count(prefix=base, task="shop.charge", kind="parked") == 0

    def test_lists_can_be_filtered_by_age(self, backend: BaseLockBackend) -> None:
        """On every store: the store reckons ages by its own clock."""
        self.needs(backend, "listing")
        base = self.name()
        old = self.grant(backend, self.request(f"{base}:old", metadata='{"task_name": "shop"}'))
        self.outlive(backend, self.grant(backend, self.request(self.name(), ttl=self.SHORT)).name)
        new = self.grant(backend, self.request(f"{base}:new"))
        info = backend.get(old.name)
        assert info is not None
        # Parts of a store may differ by a moment about when they granted it.
        assert info.age > self.SHORT / 2

        def found(older_than: float, **kwargs: Any) -> list[str]:
            infos = backend.list(prefix=base, older_than=older_than, **kwargs)
            return [info.name for info in infos]

        limit = info.age / 2
        assert old.name in found(limit)
        assert found(limit, kind="held", task="sho", host=current().host) == [old.name]
        assert found(limit, task="shop.") == []
        names, newer = found(limit), backend.get(new.name)
        assert newer is not None
        # On a busy machine, the other one may have become as old by now.
        assert names == [old.name] or newer.age >= limit
        assert found(0.0, sort=["age"]) == [new.name, old.name]
        assert found(3600.0) == []
        assert backend.count(prefix=base, older_than=limit, task="sho", holder_state="alive") == 1

    def test_a_search_can_be_combined_with_a_filter(self, backend: BaseLockBackend) -> None:
        """On every store: a store may search with one query and filter with another."""
        self.needs(backend, "listing")
        base = self.name()
        kinds: list[Kind] = ["held", "parked"] if "parking" in backend.capabilities else ["held"]
        for kind in kinds:
            request = self.request(
                f"{base}:{kind}", kind=kind, metadata='{"task_name": "shop.charge"}'
            )
            self.grant(backend, request)
        for kind in kinds:
            (found,) = backend.list(prefix=base, contains="op.cha", kind=kind)
            assert found.kind == kind
        assert backend.count(prefix=base, contains="op.cha", holder_state="alive") == 1

    def test_a_lease_tells_when_it_was_renewed(self, backend: BaseLockBackend) -> None:
        """On every store: the store notes the time of a renewal."""
        self.needs(backend, "listing")
        lease = self.grant(backend, self.request(self.name(), ttl=30))
        fresh = backend.get(lease.name)
        assert fresh is not None
        if fresh.granted_ttl is None:
            # Renewals are not written down.
            assert "renewals" in fresh.unknown
            assert fresh.renewed_ago is None
            return
        assert abs(fresh.granted_ttl - 30) < 0.5
        self.renew(backend, lease, ttl=90)
        renewed = backend.get(lease.name)
        assert renewed is not None
        assert renewed.granted_ttl is not None
        assert abs(renewed.granted_ttl - 90) < 2
        assert renewed.renewed_ago is not None
        assert 0 <= renewed.renewed_ago < 30
        assert not renewed.is_late

    def test_lists_are_searched_by_what_names_contain(self, backend: BaseLockBackend) -> None:
        """On every store: wildcards and case are the store's own."""
        self.needs(backend, "listing")
        base = self.name()
        for ending in (":a%b", ":a_b", ":AxB"):
            self.grant(backend, self.request(base + ending))
        mark = base.split(":")[1]
        assert backend.count(contains=mark) == 3
        assert [i.name for i in backend.list(prefix=base, contains="a%b")] == [base + ":a%b"]
        assert backend.count(prefix=base, contains="_") == 1
        assert backend.count(prefix=base, contains="axb") == 0
        assert backend.count(prefix=mark) == 0

    def test_lists_are_searched_by_task_and_path_too(self, backend: BaseLockBackend) -> None:
        """On every store: the store looks into the JSON, and not at its keys."""
        self.needs(backend, "listing")
        base, mark = self.name(), 'ü"/%' + self.name()
        for key in ("task_name", "task_id", "path", "user", "note"):
            metadata = json.dumps({key: f"some {mark} there", "number": 7})
            self.grant(backend, self.request(f"{base}:{key}", metadata=metadata))

        def found(contains: str) -> list[str]:
            infos = backend.list(prefix=base, contains=contains)
            return [info.name.removeprefix(base + ":") for info in infos]

        assert found(mark) == ["task_name", "task_id", "path"]
        assert found("task_name") == ["task_name"], "in a name, and not in the keys of metadata"
        assert backend.count(contains=mark) == 3
        assert backend.count(contains=mark.upper()) == 0

    # -- waiters -----------------------------------------------------------------------

    def waiters(self, backend: BaseLockBackend, name: str, limit: int = 100) -> list[Waiter]:
        """The waiters; skips the test if the backend says that it does not know them."""
        try:
            return backend.waiters(name, limit=limit)
        except NotImplementedError:
            self.needs(backend, "listing")
            info = backend.get(name)
            assert info is not None
            assert "waiting" in info.unknown
            import pytest

            pytest.skip("the backend does not know its waiters")

    def test_waiters_are_listed_in_order_of_arrival(self, backend: BaseLockBackend) -> None:
        """On every store: the store must keep waiters in the order in which they came."""
        lease = self.grant(backend, self.request(self.name()))
        assert self.waiters(backend, lease.name) == []
        metadata = json.dumps({"task_name": "shop.charge", "note": "ü\n"})
        requests = [self.request(lease.name, waits=True) for _ in range(4)]
        requests[2] = requests[2]._replace(metadata=metadata)
        for request in requests:
            self.refuse(backend, request)
        # Asking again does not change the order, nor since when it waits.
        before = backend.waiters(lease.name)
        self.refuse(backend, requests[0])
        found = backend.waiters(lease.name)
        assert [it.owner for it in found] == [it.owner for it in requests]
        assert [(it.name, it.alias) for it in found] == [(lease.name, backend.alias)] * 4
        assert [it.metadata for it in found] == [{}, {}, json.loads(metadata), {}]
        assert {it.process for it in found} == {current()}
        assert {it.state for it in found} == {"alive"}
        assert all(0 <= it.waited < 30 and it.since.tzinfo is not None for it in found)
        assert found[0].waited >= before[0].waited - self.SPREAD
        assert abs((found[0].since - before[0].since).total_seconds()) < 0.01 + self.SPREAD
        first = backend.waiters(lease.name, limit=2)
        assert [it.owner for it in first] == [it.owner for it in requests[:2]]
        assert backend.waiters(lease.name, limit=0) == []

    def test_a_waiter_that_has_given_up_is_not_told(self, backend: BaseLockBackend) -> None:
        """On every store: the store takes a request out of its queue."""
        lease = self.grant(backend, self.request(self.name()))
        gives_up, cancelled, stays = (self.request(lease.name, waits=True) for _ in range(3))
        for request in (gives_up, cancelled, stays):
            self.refuse(backend, request)
        self.refuse(backend, gives_up._replace(waits=False))
        backend.cancel_acquire(cancelled, deadline=self.soon(backend))
        assert [it.owner for it in self.waiters(backend, lease.name)] == [stays.owner]
        self.release(backend, lease)
        self.acquire_waiting(backend, stays)
        assert backend.waiters(lease.name) == []

    def test_a_waiter_with_odd_metadata_hides_nobody(self, backend: BaseLockBackend) -> None:
        """On every store: the backend reads what it has stored as text."""
        lease = self.grant(backend, self.request(self.name()))
        for metadata in ("", "[1, 2]", "no json", "{}"):
            self.refuse(backend, self.request(lease.name, waits=True, metadata=metadata))
        found = self.waiters(backend, lease.name)
        assert [it.metadata for it in found] == [{}, {}, {}, {}]
        assert [it.holding for it in found] == [(), (), (), ()]
        assert found[0].as_dict()["waiter"]["task_id"] is None

    def test_a_waiter_whose_process_is_gone_is_told_apart(self, backend: BaseLockBackend) -> None:
        """On every store: the store keeps each waiter's process."""
        lease = self.grant(backend, self.request(self.name(), ttl=10 * self.PATIENCE))
        gone, stays = (self.request(lease.name, waits=True) for _ in range(2))
        self.waiters(backend, lease.name)
        if not backend.is_shared:
            # The child would have a store of its own.
            return
        assert not self.granted_to_child(backend, gone)
        self.refuse(backend, stays)
        # A store with sessions may have noticed it by itself.
        found = {it.owner: it.state for it in backend.waiters(lease.name)}
        assert found.pop(gone.owner, "dead") == "dead"
        assert found == {stays.owner: "alive"}

    # -- breaks ------------------------------------------------------------------------

    def test_a_break_names_the_owner(self, backend: BaseLockBackend) -> None:
        """On every store: the store's break compares the owner."""
        lease = self.grant(backend, self.request(self.name()))
        assert not backend.break_silently(lease.name, owner="another")
        assert self.locked(backend, lease.name)
        assert backend.break_silently(lease.name, owner=lease.owner, deadline=self.soon(backend))
        assert not self.locked(backend, lease.name)
        assert not backend.break_silently(lease.name, owner=lease.owner)
        assert self.renew(backend, lease) == [self.outcome(backend, "broken")]

    def test_the_kind_of_a_lease_is_kept(self, backend: BaseLockBackend) -> None:
        """On every store: the kind is a field of the stored lease, which a store can lose."""
        self.needs(backend, "parking")
        parked = self.grant(backend, self.request(self.name(), kind="parked"))
        assert self.refuse(backend, self.request(parked.name)).kind == "parked"
        info = backend.get(parked.name)
        assert info is not None
        assert info.holder_state == "unknown"
