"""Settings of the ZooKeeper backend: what is refused, and what it connects with."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl

from django_dlock import BackendUnavailable, clock, conf
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.zookeeper import ZooKeeperBackend
from django_dlock.exceptions import BackendRefused
from django_dlock.lease import Lease, LeaseRequest
from django_dlock.testing.tools import ContractTools
from testproject.processes import free_port
from tests.support.aliases import configured
from tests.support.zookeeper import ZooKeeperServer

BACKEND = "django_dlock.backends.zookeeper.ZooKeeperBackend"


@contextmanager
def backend_at(location: str, prefix: str = "dlock", **options: Any) -> Iterator[ZooKeeperBackend]:
    backend = ZooKeeperBackend(
        AliasOptions(
            *("default", BACKEND),
            location=location,
            key_prefix=prefix,
            ttl=60,
            # The most that the shortest session here allows.
            command_timeout=2.0,
            options=options,
        )
    )
    try:
        yield backend
    finally:
        backend.deregister("", deadline=backend.call_deadline())


def acquire(backend: ZooKeeperBackend, name: str = "it", patience: float = 4.0) -> Any:
    request = LeaseRequest(name, ContractTools.request(name).owner, 30.0)
    return backend.acquire(request, deadline=backend.call_deadline() + patience)


@pytest.fixture
def client(zookeeper_server: ZooKeeperServer) -> Iterator[Any]:
    """An operator's."""
    client = KazooClient(zookeeper_server.location)
    client.start()
    yield client
    client.stop()
    client.close()


# -- settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "check_id", "words"),
    [
        ({}, "E006", "no 'LOCATION'"),
        ({"LOCATION": "redis://localhost:6379/0"}, "E006", "host and port"),
        ({"LOCATION": "host:port"}, "E006", "'host:port'"),
        ({"LOCATION": "host:2181,,other:2181"}, "E006", "''"),
        ({"LOCATION": ["host:2181", "user@other:2181"]}, "E006", "********@other"),
        ({"LOCATION": "host:2181", "CACHE": "default"}, "E006", "'CACHE'"),
        ({"LOCATION": "host", "OPTIONS": {"sesion": 1}}, "E008", "'sesion'"),
        ({"LOCATION": "host", "OPTIONS": {"credentials": "user"}}, "E008", "********"),
        ({"LOCATION": "host", "OPTIONS": {"client": []}}, "E008", "'client'"),
        ({"LOCATION": "host", "OPTIONS": {"client": {"timeout": 3}}}, "E008", "'timeout'"),
        ({"LOCATION": "host", "OPTIONS": {"session_timeout": "9"}}, "E005", "'9'"),
        ({"LOCATION": "host", "OPTIONS": {"session_timeout": 5}}, "E007", "6 times"),
    ],
)
def test_wrong_settings_are_errors(entry: dict[str, Any], check_id: str, words: str) -> None:
    with configured({"default": {"BACKEND": BACKEND, **entry}}):
        (problem,) = conf.problems()
    assert problem.id == check_id
    assert words in problem.message


@pytest.mark.parametrize(
    "location", ["host", "host:2181", "a:1,b:2,[::1]:3/some/chroot", ["a:1", "b:2"]]
)
def test_servers_and_a_chroot_are_accepted(location: Any) -> None:
    with configured({"default": {"BACKEND": BACKEND, "LOCATION": location}}):
        assert conf.problems() == []


# -- what the server says ------------------------------------------------------------------


def test_a_shorter_session_grants_shorter_leases_and_is_a_warning() -> None:
    with ZooKeeperServer(settings={"maxSessionTimeout": 12_000}) as server:
        with backend_at(server.location, session_timeout=40) as backend:
            lease = acquire(backend)
            assert isinstance(lease, Lease)
            assert lease.ttl == pytest.approx(6.0)
            (problem,) = backend.store_problems()
        assert problem.id == "W009"
        assert "12 s and not for the 40 s" in problem.message
        with backend_at(server.location, session_timeout=12) as backend:
            assert backend.store_problems() == []


def test_a_missing_chroot_is_named(zookeeper_server: ZooKeeperServer, client: Any) -> None:
    location = f"{zookeeper_server.location}/chroot/of/ours"
    with backend_at(location) as backend:
        with pytest.raises(BackendRefused, match="'/chroot/of/ours', which does not exist"):
            acquire(backend)
        client.ensure_path("/chroot/of/ours")
        assert isinstance(acquire(backend), Lease)
        assert client.exists("/chroot/of/ours/dlock")


def test_a_key_prefix_may_contain_anything(zookeeper_server: ZooKeeperServer) -> None:
    for prefix in ("a/b", "..", "ü:{x}", "zookeeper"):
        with backend_at(zookeeper_server.location, prefix) as backend:
            assert isinstance(acquire(backend), Lease)


def test_nodes_belong_to_the_credentials(zookeeper_server: ZooKeeperServer, client: Any) -> None:
    location = zookeeper_server.location
    with backend_at(location, "secret", credentials="ours:open sesame") as ours:
        assert isinstance(acquire(ours), Lease)
        for credentials in ("theirs:x", "ours:wrong"):
            with backend_at(location, "secret", credentials=credentials) as theirs:
                for call in (acquire, lambda backend: backend.get("it")):
                    with pytest.raises(BackendRefused, match="rights on /secret: NoAuthError"):
                        call(theirs)
        with backend_at(location, "secret", credentials="ours:open sesame") as same:
            assert same.locked("it", deadline=same.call_deadline() + 4.0)


def test_no_rights_above_the_directory_are_needed(
    zookeeper_server: ZooKeeperServer, client: Any
) -> None:
    ours = make_digest_acl("ours", "pw", all=True)
    client.create("/made", acl=[ours])
    with backend_at(zookeeper_server.location, "made", credentials="ours:pw") as backend:
        assert isinstance(acquire(backend), Lease)


def test_refused_authentication_is_reported_at_once_and_again(
    zookeeper_server: ZooKeeperServer,
) -> None:
    # The server knows no such scheme, and ends the connection.
    client = {"auth_data": [("unheard", "of")]}
    with backend_at(zookeeper_server.location, client=client) as backend:
        for _ in range(2):
            with pytest.raises(BackendRefused, match="credentials"):
                acquire(backend)


def test_directories_that_somebody_has_deleted_are_made_again(
    zookeeper_server: ZooKeeperServer, client: Any
) -> None:
    with backend_at(zookeeper_server.location, "swept") as backend:
        first = acquire(backend)
        client.delete("/swept", recursive=True)
        second = acquire(backend)
        assert second.token > first.token
        request = [LeaseRequest(first.name, first.owner, 9.0)]
        assert backend._attempts.find(request[0].owner) != "refused"


# -- TLS -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a self-signed certificate, as files for client and server."""
    directory = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"),
    )
    both = (directory / "key.pem").read_text() + (directory / "cert.pem").read_text()
    (directory / "both.pem").write_text(both)
    return directory


# kazoo leaves the sockets of failed handshakes to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tls_is_taken_from_the_clients_arguments(certificates: Path) -> None:
    secure = free_port()
    settings = {
        "secureClientPort": secure,
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.keyStore.location": certificates / "both.pem",
        "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": certificates / "cert.pem",
        "ssl.trustStore.type": "PEM",
        "ssl.clientAuth": "none",
    }
    trusting = {"use_ssl": True, "ca": str(certificates / "cert.pem")}
    with ZooKeeperServer(settings=settings):
        with backend_at(f"127.0.0.1:{secure}", client=trusting) as backend:
            # A server that has just started may take seconds for its first handshake.
            assert isinstance(acquire(backend, patience=60.0), Lease)
        # Without the authority, it says why it does not connect.
        with (
            backend_at(f"127.0.0.1:{secure}", client={"use_ssl": True}) as backend,
            pytest.raises(BackendUnavailable, match="certificate"),
        ):
            acquire(backend)
        del backend
        gc.collect()


def test_a_session_may_be_asked_to_last_for_longer_than_the_protocol_can_say(
    zookeeper_server: ZooKeeperServer,
) -> None:
    with backend_at(zookeeper_server.location, session_timeout=clock.LONGEST) as backend:
        assert isinstance(acquire(backend), Lease)
