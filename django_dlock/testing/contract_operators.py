"""The rules for what operators see and do: single leases, lists and breaks."""

from __future__ import annotations

import json
from typing import Any

from ..backends.base import BaseLockBackend
from ..lease import SORT_KEYS, Kind, LeaseQuery, in_order
from ..process import current
from .tools import ContractTools

__all__ = ["OperatorContract"]


class OperatorContract(ContractTools):
    """A part of ``BackendContract``."""

    def test_what_is_known_of_a_name_is_told(self, backend: BaseLockBackend) -> None:
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

    def test_a_lease_is_told_in_full(self, backend: BaseLockBackend) -> None:
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
        assert info.renewals == 1
        assert info.waiting == 1
        assert info.ttl is not None
        assert info.ttl <= 40.1
        assert 0 <= info.age < 30
        assert info.acquired_at.tzinfo is not None
        assert info.process == current()
        assert info.holder_state == "alive"
        assert info.metadata == {"task_name": "shop.charge", "note": "ü"}
        assert backend.list(prefix=request.name)[0].owner == lease.owner

    def test_a_free_name_is_not_listed(self, backend: BaseLockBackend) -> None:
        self.needs(backend, "listing")
        name = self.name()
        self.release(backend, self.grant(backend, self.request(name)))
        assert backend.list(prefix=name) == []
        assert backend.count(prefix=name) == 0

    def test_what_expired_is_listed_no_more(self, backend: BaseLockBackend) -> None:
        self.needs(backend, "listing")
        lease = self.grant(backend, self.request(self.name(), ttl=self.SHORT))
        assert backend.count(prefix=lease.name) == 1
        self.outlive(backend, lease.name)
        assert backend.list(prefix=lease.name) == []
        assert backend.count(prefix=lease.name) == 0

    def test_lists_are_in_order_of_the_grants_and_paged(self, backend: BaseLockBackend) -> None:
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
        self.needs(backend, "listing", "parking", "reservations")
        base = self.name()
        kinds: tuple[Kind, ...] = ("held", "parked", "held", "reserved", "held")
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

    def test_lists_can_be_filtered(self, backend: BaseLockBackend) -> None:
        self.needs(backend, "listing", "parking")
        base = self.name()
        for letter in "dacb":
            kind: Kind = "parked" if letter in "ab" else "held"
            self.grant(backend, self.request(f"{base}:{letter}", kind=kind))

        def listed(**kwargs: Any) -> str:
            return "".join(info.name[-1] for info in backend.list(prefix=base, **kwargs))

        assert listed(kind="parked") == "ab"
        assert listed(kind="held", sort=["name"]) == "cd"
        assert listed(kind="reserved") == ""
        assert listed(holder_state="alive") == "dc"
        assert listed(holder_state="unknown", sort=["-name"], limit=1) == "b"
        assert backend.count(prefix=base, kind="parked") == 2
        assert backend.count(prefix=base, kind="parked", holder_state="alive") == 0
        assert backend.count(prefix=base, holder_state="unknown") == 2

    def test_an_unknown_order_is_refused(self, backend: BaseLockBackend) -> None:
        self.needs(backend, "listing")
        for sort in (["size"], ["--name"], "name"):
            refused = False
            try:
                backend.list(sort=sort)
            except ValueError:
                refused = True
            assert refused, sort

    def test_lists_are_searched_by_what_names_contain(self, backend: BaseLockBackend) -> None:
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

    def test_a_break_names_the_owner(self, backend: BaseLockBackend) -> None:
        lease = self.grant(backend, self.request(self.name()))
        assert not backend.break_(lease.name, owner="another")
        assert self.locked(backend, lease.name)
        assert backend.break_(lease.name, owner=lease.owner)
        assert not self.locked(backend, lease.name)
        assert not backend.break_(lease.name, owner=lease.owner)
        assert self.renew(backend, lease) == [self.outcome(backend, "broken")]

    def test_the_kind_of_a_lease_is_kept(self, backend: BaseLockBackend) -> None:
        self.needs(backend, "parking")
        parked = self.grant(backend, self.request(self.name(), kind="parked"))
        assert self.refuse(backend, self.request(parked.name)).kind == "parked"
        info = backend.get(parked.name)
        assert info is not None
        assert info.holder_state == "unknown"
