"""What lists of the etcd backend cost, and that they show one moment."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from django_dlock import clock
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.etcd import EtcdBackend, listing
from django_dlock.backends.etcd.client import Client
from django_dlock.backends.etcd.config import EtcdOptions
from django_dlock.backends.etcd.entries import now_of
from django_dlock.lease import Lease, LeaseQuery, LeaseRequest, Renewal
from django_dlock.process import current
from tests.support.etcd import EtcdServer


@pytest.fixture
def backend(etcd_server: EtcdServer) -> Iterator[EtcdBackend]:
    prefix = f"test-{secrets.token_hex(4)}"
    options = AliasOptions(
        "etcd", "etcd", location=etcd_server.url, key_prefix=prefix, command_timeout=5.0
    )
    backend = EtcdBackend(options)
    yield backend
    backend.close()


class Calls:
    """The calls of a client; ``before`` runs before each of them but the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.before: Any = None
        call = Client.call

        def counted(client: Client, path: str, body: dict[str, Any], *, deadline: float) -> Any:
            if self.before is not None and self.bodies:
                before, self.before = self.before, None
                before()
            self.bodies.append(body)
            return call(client, path, body, deadline=deadline)

        monkeypatch.setattr(Client, "call", counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def grant(backend: EtcdBackend, name: str, ttl: float = 30.0) -> Lease:
    request = LeaseRequest(name=name, owner=secrets.token_hex(16), ttl=ttl)
    answer = backend.acquire(request, deadline=backend.call_deadline())
    assert isinstance(answer, Lease)
    return answer


@pytest.fixture
def names(backend: EtcdBackend) -> list[str]:
    held = ["order:ü", "order:c", "order:a", "shop:b", "order:d"]
    for name in held:
        grant(backend, name)
    return held


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ((), [0, 1, 2, 3, 4]),
        (("age",), [4, 3, 2, 1, 0]),
        (("-token", "name"), [4, 3, 2, 1, 0]),
        (("alias", "name"), [2, 1, 4, 0, 3]),
        (("-name",), [3, 0, 4, 1, 2]),
    ],
)
def test_etcd_sorts_and_cuts_the_first_page_itself(
    backend: EtcdBackend, names: list[str], calls: Calls, sort: Any, expected: list[int]
) -> None:
    infos, total = backend.page(LeaseQuery(sort=sort), limit=3)
    assert [info.name for info in infos] == [names[number] for number in expected[:3]]
    assert total == 5
    (body,) = calls.bodies
    assert body["limit"] == "3"


def test_a_later_page_reads_only_keys_of_those_before_it(
    backend: EtcdBackend, names: list[str], calls: Calls
) -> None:
    held = backend.get(names[3])
    assert held is not None
    calls.bodies.clear()
    calls.before = lambda: backend.break_silently(held.name, owner=held.owner)
    infos, total = backend.page(LeaseQuery(), offset=2, limit=2)
    # The name was released between the two reads.
    assert [info.name for info in infos] == names[2:4]
    assert total == 5
    assert calls.bodies[0]["keys_only"]
    assert backend.page(LeaseQuery(), offset=9, limit=2) == ([], 4)


def test_odd_metadata_is_marked(backend: EtcdBackend) -> None:
    odd = LeaseRequest(name="odd", owner=secrets.token_hex(16), ttl=30.0, metadata="no json")
    backend.acquire(odd, deadline=backend.call_deadline())
    (found,) = backend.list()
    assert (found.damaged, found.metadata) == (("metadata",), {})


def test_a_count_reads_no_key(backend: EtcdBackend, names: list[str], calls: Calls) -> None:
    assert backend.count(prefix="order:") == 4
    (body,) = calls.bodies
    assert body["count_only"]


def test_a_search_reads_some_keys_at_a_time_at_one_revision(
    backend: EtcdBackend, names: list[str], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "KEYS_PER_READ", 2)
    calls.before = lambda: grant(backend, "order:new")
    assert [info.name for info in backend.list(contains="order:")] == [*names[:3], names[4]]
    reads = [body for body in calls.bodies if "range_end" in body]
    assert [body["limit"] for body in reads] == ["2"] * 3
    assert len({body["revision"] for body in reads[1:]}) == 1


def test_another_prefix_is_not_listed(etcd_server: EtcdServer, backend: EtcdBackend) -> None:
    grant(backend, "a")
    other = backend.options.key_prefix + "0"
    options = AliasOptions("other", "etcd", location=etcd_server.url, key_prefix=other)
    stranger = EtcdBackend(options)
    assert stranger.list() == []
    stranger.close()


def test_a_renewal_is_written_down(backend: EtcdBackend, calls: Calls) -> None:
    lease = grant(backend, "a")
    renewal = Renewal("a", lease.owner, 90.0)
    backend.renew([renewal], process=current().id, deadline=clock.now() + 5)
    calls.bodies.clear()
    (info,) = backend.list()
    assert len(calls.bodies) == 1
    assert (info.renewals, info.granted_ttl) == (1, 90)
    assert info.ttl is not None
    assert 60 < info.ttl <= 90


def test_a_lease_that_nobody_renews_shows_no_sign_of_life(
    backend: EtcdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = grant(backend, "a", ttl=300)
    (fresh,) = backend.list()
    assert fresh.holder_state == "alive"
    monkeypatch.setattr(f"{listing.__name__}.now_of", lambda answer: now_of(answer) + 20)
    (info,) = backend.list()
    assert (info.holder_state, info.silent_for) == ("unknown", None)
    backend.renew([Renewal("a", lease.owner, 300.0)], process="", deadline=clock.now() + 5)
    (renewed,) = backend.list()
    assert renewed.holder_state == "alive"


def test_the_time_left_is_not_known_when_a_lease_outlives_it(
    backend: EtcdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an election, etcd gives every lease its whole TTL again."""
    grant(backend, "a")
    monkeypatch.setattr(f"{listing.__name__}.now_of", lambda answer: now_of(answer) + 40)
    for info in (*backend.list(), *backend.get_many(["a"]).values()):
        assert (info.ttl, info.unknown) == (30, ("ttl", "waiting"))
        assert info.renewed_ago is None
    info = backend.get("a")
    assert info is not None
    assert info.unknown == ("waiting",)


def compact(backend: EtcdBackend) -> None:
    """Let etcd forget all earlier revisions, as its operator or its own setting does."""
    grant(backend, "newest")
    client = Client(backend.options, EtcdOptions.read(backend.options))
    deadline = backend.call_deadline()
    revision = client.call("/v3/kv/range", {"key": "AA=="}, deadline=deadline)["header"]["revision"]
    client.call("/v3/kv/compaction", {"revision": revision, "physical": True}, deadline=deadline)
    client.close()


@pytest.mark.parametrize("query", [{"contains": "order:"}, {"offset": 1, "limit": 4}])
def test_a_list_that_a_compaction_overtakes_is_read_again(
    backend: EtcdBackend,
    names: list[str],
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    query: dict[str, Any],
) -> None:
    monkeypatch.setattr(listing, "KEYS_PER_READ", 2)
    calls.before = lambda: compact(backend)
    found = [info.name for info in backend.list(**query)]
    assert [name for name in found if name.startswith("order:")] == (
        [*names[:3], names[4]] if "contains" in query else ["order:c", "order:a", "order:d"]
    )


def test_an_order_by_waiters_reads_only_the_page(
    backend: EtcdBackend, names: list[str], calls: Calls
) -> None:
    infos, total = backend.page(LeaseQuery(sort=("-waiting",)), limit=2)
    assert ([info.name for info in infos], total) == (names[:2], 5)
    # etcd does not know who waits, so there is no need to read all of them.
    assert len(calls.bodies) == 1
    assert calls.bodies[0]["limit"] == "2"
