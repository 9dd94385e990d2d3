"""A Redis Cluster with TLS, with restricted users, and whose nodes are known by host names."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import redis

from django_dlock.backends.redis import RedisBackend
from django_dlock.backends.redis.keys import Keys
from django_dlock.exceptions import BackendRefused, BackendUnavailable
from testproject.servers import RedisServer
from tests.backends.test_redis_acl import LEAST
from tests.conftest import missing
from tests.support.redis_calls import backend_for, grant, refuse, release, renew, request, wait
from tests.support.redis_cluster import Certificates, RedisCluster

USER, PASSWORD = "worker", "pw"


def started(**options: object) -> Iterator[RedisCluster]:
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(RedisCluster(**options))  # type: ignore[arg-type]
        except RuntimeError as error:
            # Not installed, or without TLS.
            missing(str(error))
        yield cluster


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A self-signed certificate for the address and the name of this machine."""
    if shutil.which("openssl") is None:
        missing("no openssl")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=dlock", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key, certificate


@pytest.fixture(scope="module")
def secured(certificates: Certificates) -> Iterator[RedisCluster]:
    """TLS, and nodes that name one another by a host name, which the certificate covers."""
    names = ["--cluster-announce-hostname", "localhost"]
    names += ["--cluster-preferred-endpoint-type", "hostname"]
    with RedisServer() as probe:
        if not accepts(probe, "cluster-preferred-endpoint-type"):
            pytest.skip("before Redis 7, nodes have no host names")
    yield from started(tls=certificates, args=names)


@pytest.fixture(scope="module")
def restricted() -> Iterator[RedisCluster]:
    """The user of the locks has the least rights, and the default user none."""
    with RedisServer() as probe:
        if not accepts(probe, "acl-pubsub-default"):
            pytest.skip("Redis 6.0 has no rights for channels")
    for cluster in started():
        for node in cluster.nodes:
            cluster.ask(node, "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *LEAST.split())
        yield cluster


def accepts(server: RedisServer, setting: str) -> bool:
    with redis.Redis.from_url(server.url) as client:
        return bool(client.config_get(setting))


def use(backend: RedisBackend) -> None:
    """Everything that holders and waiters do."""
    lease, attempt = grant(backend, request()), request(waits=True, renewed=True)
    refuse(backend, attempt)
    # From now on it listens.
    wait(backend, attempt, refuse(backend, attempt), 20.0)
    found = refuse(backend, attempt)
    assert renew(backend, lease) == ["renewed"]
    assert release(backend, lease) == "released"
    handed = wait(backend, attempt, found, 20.0)
    assert handed is not None
    assert handed.token > lease.token
    assert backend.get("name").owner == attempt.owner
    assert release(backend, handed) == "released"


@pytest.mark.parametrize("number", range(6))
def test_nodes_with_tls_lead_to_one_another_by_host_name(
    secured: RedisCluster, certificates: Certificates, number: int
) -> None:
    kwargs = {"ssl_ca_certs": str(certificates[2]), "ssl_check_hostname": True}
    url = secured.nodes[number].url
    assert url.startswith("rediss://127.0.0.1")
    use(backend_for(url, command_timeout=5.0, options={"connection_kwargs": kwargs}))
    with pytest.raises(redis.exceptions.MovedError) as caught:
        secured.ask(secured.stranger, "GET", Keys("dlock").index)
    assert caught.value.host == "localhost"


def test_a_node_with_tls_whose_certificate_is_not_trusted_is_refused(secured: RedisCluster) -> None:
    with pytest.raises(BackendUnavailable, match=r"(?i)certificate"):
        grant(backend_for(secured.stranger.url, command_timeout=5.0), request())


@pytest.mark.parametrize("number", range(6))
def test_the_least_rights_are_enough_in_a_cluster(restricted: RedisCluster, number: int) -> None:
    url = restricted.nodes[number].url.replace("redis://", f"redis://{USER}:{PASSWORD}@")
    backend = backend_for(url, command_timeout=5.0)
    use(backend)
    assert backend.store_problems() == []


def test_a_user_of_a_cluster_without_rights_to_the_keys_is_told(restricted: RedisCluster) -> None:
    for node in restricted.nodes:
        rules = [rule for rule in LEAST.split() if not rule.startswith("~")]
        restricted.ask(node, "ACL", "SETUSER", "other", "reset", "on", ">pw", *rules)
    url = restricted.stranger.url.replace("redis://", "redis://other:pw@")
    with pytest.raises(BackendRefused, match=r"(?i)no permissions|NOPERM"):
        grant(backend_for(url, command_timeout=5.0), request())


def test_a_wrong_password_in_a_cluster_is_refused_at_once(restricted: RedisCluster) -> None:
    url = restricted.stranger.url.replace("redis://", f"redis://{USER}:wrong@")
    with pytest.raises(BackendRefused, match=r"(?i)password|WRONGPASS"):
        grant(backend_for(url, command_timeout=5.0), request())
