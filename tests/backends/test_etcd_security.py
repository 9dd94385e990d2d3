"""Who may use etcd: users and roles, certificates, and what is not etcd at all."""

from __future__ import annotations

import http.server
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest

from django_dlock import Lock
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.etcd import EtcdBackend
from django_dlock.exceptions import BackendRefused, BackendUnavailable, InvalidLockBackend
from tests.conftest import missing, started
from tests.support.etcd import EtcdServer, certificates
from tests.support.limited_users import guard_etcd

from .test_etcd_faults import Waiting, ask, configured_alias, grant, locked, release
from .test_etcd_faults import request as attempt

Make = Callable[..., EtcdBackend]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def make(location: str, prefix: str = "dlock", **options: Any) -> EtcdBackend:
            backend = EtcdBackend(
                AliasOptions(
                    *("etcd", "etcd"),
                    location=location,
                    key_prefix=prefix,
                    command_timeout=options.pop("command_timeout", 5.0),
                    options=options,
                )
            )
            stack.callback(backend.close)
            return backend

        yield make


# -- users -------------------------------------------------------------------------------------


@pytest.fixture
def guarded(own_etcd: EtcdServer) -> EtcdServer:
    """An etcd with the user ``locks``, who may only use the keys of the prefix ``dlock``."""
    guard_etcd(own_etcd, ["dlock/1/"])
    return own_etcd


USER = {"username": "locks", "password": "secret"}


def test_a_user_needs_no_more_than_its_own_keys(guarded: EtcdServer, make: Make) -> None:
    backend = make(guarded.url, **USER)
    lease = grant(backend, attempt())
    assert not isinstance(ask(backend, attempt()), type(lease))
    assert backend.get("name") is not None
    assert release(backend, lease) == "released"
    assert backend.store_problems() == ()


def test_a_waiter_of_a_user_is_woken(guarded: EtcdServer) -> None:
    options = {"command_timeout": 5.0, **USER}
    for backend in configured_alias(guarded.url, TTL=15.0, OPTIONS=options):
        lease = grant(backend, attempt(ttl=3600.0))
        waiting = Waiting.until_watching()
        release(backend, lease)
        assert waiting.end()


def test_a_user_is_authenticated_again_after_a_restart(guarded: EtcdServer, make: Make) -> None:
    # A restart makes etcd forget its tokens; so does a while without use.
    backend = make(guarded.url, **USER)
    lease = grant(backend, attempt())
    guarded.restart()
    assert release(backend, lease) == "released"


def test_g1_a_user_whose_role_has_changed_goes_on(guarded: EtcdServer, make: Make) -> None:
    backend = make(guarded.url, **USER)
    lease = grant(backend, attempt())
    guarded.call("auth/role/add", name="another", token=guarded.token_of("root", "root"))
    assert release(backend, lease) == "released"


def test_a_wrong_password_is_refused(guarded: EtcdServer, make: Make) -> None:
    backend = make(guarded.url, username="locks", password="wrong")
    with pytest.raises(BackendRefused, match="authentication failed"):
        ask(backend, attempt())


def test_a_missing_user_is_refused(guarded: EtcdServer, make: Make) -> None:
    with pytest.raises(BackendRefused, match="user name is empty"):
        ask(make(guarded.url), attempt())


def test_a_user_where_etcd_knows_none_is_refused(own_etcd: EtcdServer, make: Make) -> None:
    with pytest.raises(BackendRefused, match="authentication is not enabled"):
        ask(make(own_etcd.url, **USER), attempt())


def test_a_user_without_rights_is_refused_and_checked(guarded: EtcdServer, make: Make) -> None:
    backend = make(guarded.url, prefix="other", **USER)
    with pytest.raises(BackendRefused, match="permission denied for the keys other/1/"):
        ask(backend, attempt())
    (problem,) = backend.store_problems()
    assert problem.id == "W010"
    assert "readwrite other/1/ --prefix=true" in problem.hint


def test_a_user_who_may_only_read_is_checked(guarded: EtcdServer, make: Make) -> None:
    guarded.allow("READ", "locks", "other/1/", token=guarded.token_of("root", "root"))
    backend = make(guarded.url, prefix="other", **USER)
    assert not locked(backend)
    assert [problem.id for problem in backend.store_problems()] == ["W010"]


# -- certificates ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    try:
        return certificates(tmp_path_factory.mktemp("tls"))
    except (OSError, CalledProcessError) as error:
        missing(f"openssl cannot make a certificate: {error}")


@pytest.fixture(scope="module")
def secured(files: tuple[Path, Path]) -> Iterator[EtcdServer]:
    yield from started(EtcdServer(tls=files))


def shown(files: tuple[Path, Path]) -> dict[str, str]:
    certificate, key = map(str, files)
    return {"ca_cert": certificate, "client_cert": certificate, "client_key": key}


def test_tls_with_a_certificate_of_the_client(
    secured: EtcdServer, files: tuple[Path, Path]
) -> None:
    options = {"command_timeout": 5.0, **shown(files)}
    for backend in configured_alias(secured.url, TTL=15.0, OPTIONS=options):
        lease = grant(backend, attempt(ttl=3600.0))
        waiting = Waiting.until_watching()
        release(backend, lease)
        assert waiting.end()
        with Lock("name"):
            assert locked(backend)


def test_tls_without_the_clients_certificate_is_refused(
    secured: EtcdServer, files: tuple[Path, Path], make: Make
) -> None:
    backend = make(secured.url, ca_cert=str(files[0]))

    def refusal() -> BackendUnavailable:
        with pytest.raises(BackendUnavailable) as raised:
            ask(backend, attempt())
        return raised.value

    # The server closes the connection at once, and that may be seen before its reason is read.
    errors = (refusal() for _ in range(20))
    refused = next(error for error in errors if isinstance(error, BackendRefused))
    assert "TLS failed" in str(refused)


def test_tls_without_the_certificate_authority_is_refused(secured: EtcdServer, make: Make) -> None:
    with pytest.raises(BackendRefused, match="CERTIFICATE_VERIFY_FAILED"):
        ask(make(secured.url), attempt())


def test_tls_to_another_host_is_refused(
    secured: EtcdServer, files: tuple[Path, Path], make: Make
) -> None:
    url = secured.url.replace("127.0.0.1", "localhost")
    with pytest.raises(BackendRefused, match="TLS failed"):
        ask(make(url, **shown(files)), attempt())


def test_tls_to_an_etcd_without_it_is_refused(etcd_server: EtcdServer, make: Make) -> None:
    with pytest.raises(BackendUnavailable, match="does it serve TLS"):
        ask(make(etcd_server.url.replace("http:", "https:")), attempt())


def test_an_etcd_with_tls_is_not_taken_for_one_without(secured: EtcdServer, make: Make) -> None:
    # etcd only closes the connection. The call is repeated until its time is over.
    with pytest.raises(BackendUnavailable, match="does it want https"):
        ask(make(secured.url.replace("https:", "http:"), command_timeout=1.5), attempt())


def test_a_missing_file_is_reported_before_the_first_call(make: Make) -> None:
    with pytest.raises(InvalidLockBackend, match="files for TLS"):
        make("https://127.0.0.1:1", ca_cert=f"/nowhere/{secrets.token_hex(4)}")


# -- no etcd -----------------------------------------------------------------------------------


def test_a_server_that_is_no_etcd_is_reported_as_such(make: Make) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *args: None  # type: ignore[method-assign]
    server.RequestHandlerClass.do_POST = lambda self: self.send_error(404)  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(BackendRefused, match="correct LOCATION"):
            ask(make(f"http://127.0.0.1:{server.server_port}"), attempt())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
