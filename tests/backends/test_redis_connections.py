"""All ways to connect to Redis, and settings that are refused before connecting."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from django.test import override_settings
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from django_dlock.exceptions import BackendRefused, BackendUnavailable, InvalidLockBackend
from testproject.servers import RedisServer, ServerNotFound, free_port
from tests.conftest import missing
from tests.support.redis_calls import backend_for, calls, grant, release, renew, request, wait

DJANGO = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"
RETRIES = {
    # A project may set these for its cache; the locks must ignore them.
    "retry": Retry(ConstantBackoff(0.01), 10),
    "retry_on_timeout": True,
    "retry_on_error": [RedisConnectionError],
    "health_check_interval": 1,
    "socket_timeout": 60,
    "decode_responses": True,
    "max_connections": 1,
}

databases = itertools.count(7)


def start(**kwargs) -> RedisServer:
    try:
        return RedisServer(**kwargs).start()
    except ServerNotFound as error:
        missing(str(error))


def assert_works(backend):
    attempt = request()
    lease = grant(backend, attempt)
    assert renew(backend, lease) == ["renewed"]
    assert backend.get("name").owner == lease.owner
    assert release(backend, lease) == "released"


# -- by URL ----------------------------------------------------------------------------


def test_a_unix_socket():
    with start(unix_socket=True) as server:
        assert_works(backend_for(server.unix_url))


def test_a_password():
    with start(password="s3cret @/:é") as server:
        assert_works(backend_for(server.url))
        with pytest.raises(BackendRefused) as refused:
            grant(backend_for(f"redis://127.0.0.1:{server.port}/0"), request())
        assert "authenticat" in str(refused.value).lower()


def test_a_password_in_connection_kwargs():
    with start(password="pw") as server:
        options = {"connection_kwargs": {"password": "pw"}}
        assert_works(backend_for(f"redis://127.0.0.1:{server.port}/0", options=options))


@pytest.mark.parametrize("credentials", ["", ":wrong@", "nobody:pw@"])
def test_the_error_for_a_wrong_password_names_the_setting(credentials):
    with start(password="pw") as server:
        backend = backend_for(f"redis://{credentials}127.0.0.1:{server.port}/0")
        with pytest.raises(BackendRefused, match=r"refused .*password of DLOCKS\['redis'\]"):
            backend.acquire(request(), deadline=backend.call_deadline())
        with pytest.raises(BackendRefused, match="refused"):
            backend.list()
        backend.close()


def test_another_database(own_redis):
    backend = backend_for(own_redis.url.removesuffix("0") + "5")
    grant(backend, request())
    assert backend.count() == 1
    assert backend_for(own_redis.url).count() == 0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A certificate for 127.0.0.1 and its key; the certificate is also its own CA."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        missing(f"openssl cannot make a certificate: {error}")
    return certificate, key, certificate


@pytest.fixture
def tls_redis(certificates):
    try:
        server = start(tls=certificates)
    except RuntimeError as error:
        missing(f"this Redis has no TLS: {error}")
    yield server
    server.stop()


def test_tls(tls_redis, certificates):
    options = {"connection_kwargs": {"ssl_ca_certs": str(certificates[2])}}
    assert_works(backend_for(tls_redis.url, options=options))


def test_tls_without_the_certificate_authority_is_refused(tls_redis):
    with pytest.raises(BackendRefused, match="CERTIFICATE_VERIFY_FAILED"):
        grant(backend_for(tls_redis.url), request())


def test_tls_to_a_server_without_it_is_refused(own_redis):
    with pytest.raises(BackendUnavailable):
        grant(backend_for(own_redis.url.replace("redis://", "rediss://")), request())


@pytest.fixture
def sentinel(own_redis):
    conf = f"sentinel monitor mymaster 127.0.0.1 {own_redis.port} 1\n"
    server = start(sentinel=conf)
    yield server
    server.stop()


def test_a_sentinel(sentinel):
    options = {"sentinels": [("127.0.0.1", free_port()), ("127.0.0.1", sentinel.port)]}
    assert_works(backend_for("redis://mymaster/0", options=options))
    options["service_name"] = "mymaster"
    assert_works(backend_for("redis://anything/0", options=options))


def test_an_unknown_service_is_unavailable(sentinel):
    options = {"sentinels": [("127.0.0.1", sentinel.port)]}
    with pytest.raises(BackendUnavailable, match="No master found") as unavailable:
        grant(backend_for("redis://another/0", options=options), request())
    # No refusal: the Sentinels may find a master soon.
    assert not isinstance(unavailable.value, BackendRefused)


# -- with the settings of a cache ---------------------------------------------------------------


def cache(backend: str, location: str, options: dict[str, object] | None = None):
    entry = {"BACKEND": backend, "LOCATION": location, "OPTIONS": options or {}}
    return override_settings(CACHES={"default": entry})


@pytest.mark.parametrize("backend", [DJANGO, DJANGO_REDIS])
def test_a_cache(own_redis, backend):
    with cache(backend, own_redis.url):
        assert_works(backend_for(cache="default"))
    assert calls(own_redis)["evalsha"] >= 4


@pytest.mark.parametrize("backend", [DJANGO, DJANGO_REDIS])
def test_g5_the_retries_of_a_cache_never_reach_its_locks(proxy, own_redis, backend):
    options = RETRIES if backend == DJANGO else {"CONNECTION_POOL_KWARGS": RETRIES}
    with cache(backend, proxy.url, options):
        locks = backend_for(cache="default", command_timeout=2.0)
    assert_works(locks)
    proxy.drop_replies(how="swallow")
    attempt = request()
    with pytest.raises(BackendUnavailable):
        grant(locks, attempt)
    assert proxy.replies_dropped == 1
    seen = proxy.count("EVALSHA")
    assert grant(locks, attempt).owner == attempt.owner
    assert proxy.count("EVALSHA") - seen == 1


def test_more_locks_wait_at_once_than_the_pool_of_the_cache_allows(own_redis):
    with cache(DJANGO, own_redis.url, {"max_connections": 1}):
        backend = backend_for(cache="default")
    first = backend.start_renew([], process="p", deadline=backend.call_deadline())
    second = backend.start_renew([], process="p", deadline=backend.call_deadline())
    assert_works(backend)
    assert first.result() == second.result() == []


def test_a_django_redis_cache_with_its_own_password(own_redis):
    with start(password="pw") as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        with cache(DJANGO_REDIS, url, {"PASSWORD": "pw"}):
            assert_works(backend_for(cache="default"))


def test_a_django_redis_cache_by_sentinel(sentinel):
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        # One of them is down; the cache itself would try it ten times.
        "SENTINELS": [("127.0.0.1", free_port()), ("127.0.0.1", sentinel.port)],
    }
    # Use another database number, because django-redis shares its pools by URL.
    with cache(DJANGO_REDIS, f"redis://mymaster/{next(databases)}", options):
        backend = backend_for(cache="default")
    assert_works(backend)


def test_a_blocking_pool_of_the_cache_does_not_grow_with_the_locks(own_redis):
    pool = {"CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool"}
    with cache(DJANGO_REDIS, own_redis.url, pool):
        from django.core.cache import caches

        backend = backend_for(cache="default")
        assert_works(backend)
        shared = caches["default"].client.get_client(write=True).connection_pool
        assert not shared._connections


# -- refused settings -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "options", "says"),
    [
        ("redis://h/0", {"silence": 1}, r"DLOCKS\['redis'\]\['OPTIONS'\].*'silence'.*sentinels"),
        ("http://h/0", {}, "does not begin with redis://"),
        ("redis://h:port/0", {}, "LOCATION"),
        ("redis://h/0", {"connection_kwargs": ["a"]}, "connection_kwargs.*takes a dict"),
        ("redis://h/0", {"connection_kwargs": {"sock_timeout": 1}}, "sock_timeout"),
        ("redis:///0", {"sentinels": [("h", 1)]}, "service_name"),
        ("redis://h/0", {"max_connections": 2}, r"\['max_connections'\] is 2.* at least 3"),
        ("redis://h/0", {"max_connections": True}, r"\['max_connections'\] is True"),
        ("redis://h/0", {"sentinels": [1]}, r"\['sentinels'\] is \[1\].*pairs"),
    ],
)
def test_the_error_for_an_unusable_setting_names_it(location, options, says):
    with pytest.raises(InvalidLockBackend, match=says):
        backend_for(location, options=options)


def test_creating_a_backend_does_not_connect(proxy):
    backend_for(proxy.url)
    with cache(DJANGO_REDIS, proxy.url):
        backend_for(cache="default")
    assert proxy.connections == 0


def test_a_waiter_that_is_stopped_leaves_no_blocked_connection(own_redis):
    backend = backend_for(own_redis.url)
    grant(backend, request())
    attempt = request(waits=True)
    met = backend.acquire(attempt, deadline=backend.call_deadline())
    until = backend.call_deadline() + 30
    backend.wait(attempt, met, until=until, interrupted=lambda: True)
    # The blocked connection was closed, so the next command gets its own reply.
    assert backend.locked("name", deadline=backend.call_deadline())
    wait(backend, attempt, met, 0.1)
