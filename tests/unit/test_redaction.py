"""No message, ``repr`` or error page shows a password of the settings."""

from __future__ import annotations

import logging
import socket
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import RequestFactory, override_settings
from django.views.debug import ExceptionReporter

from django_dlock import BackendUnavailable, checks, clock, conf, locks
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.etcd import EtcdBackend
from django_dlock.backends.etcd.client import Client
from django_dlock.backends.etcd.config import EtcdOptions
from django_dlock.exceptions import InvalidLockBackend
from django_dlock.metrics import config
from django_dlock.operators import task_url
from django_dlock.text.redaction import HIDDEN, SecretBytes, SecretText, redacted
from django_dlock.tracing import setting as tracing_setting
from testproject.processes import free_port

BACKENDS = {
    name: f"django_dlock.backends.{name}.{kind}"
    for name, kind in [
        ("redis", "RedisBackend"),
        ("redlock", "RedlockBackend"),
        ("zookeeper", "ZooKeeperBackend"),
        ("etcd", "EtcdBackend"),
        ("database", "DatabaseBackend"),
        ("failover", "FailoverBackend"),
        ("local", "LocalBackend"),
    ]
}
SEPARATORS = ["", "@", "/", "?", "#", ":", ",", "."]
"""What may be in the middle of a password that was not encoded."""


def is_told(text: str) -> bool:
    return "XYZ" in text or "UVW" in text


@pytest.fixture(autouse=True)
def backends() -> Iterator[None]:
    locks.reset()
    yield
    locks.reset()


# -- the function ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("redis://:pw@h:6379/0", "'redis://********@h:6379/0'"),
        ("redis://user:p/w@x@h", "'redis://********@h'"),
        (b"redis://:pw@h", "b'redis://********@h'"),
        ("user:pw@host:2181", "'********@host:2181'"),
        ("redis://:pw", "'redis://:********'"),
        ("redis://h?password=pw&db=1", "'redis://h?password=********&db=1'"),
        ("h:6380,password=pw,ssl=True", "'h:6380,password=********,ssl=True'"),
        ('{"a": {"password": "pw"}}', """'{"a": {"password": "********"}}'"""),
        (["redis://:pw@h"], "['redis://********@h']"),
        (("redis://:pw@h",), "('redis://********@h',)"),
        ({"redis://:pw@h"}, "{'redis://********@h'}"),
        ({"a": {"password": "pw", "db": 1}}, "{'a': {'password': '********', 'db': 1}}"),
        ({b"PASSWORD": b"pw"}, "{b'PASSWORD': '********'}"),
        ({"auth_data": [("digest", "u:pw")]}, "{'auth_data': '********'}"),
        ([("password", "pw"), 1], "[('password', '********'), 1]"),
        (("digest", "u:pw"), "('digest', '********')"),
        ("host=h password='p w' dbname=x", '"host=h password=\'********\' dbname=x"'),
        ('{"password": "p\\"w, x", "db": 1}', """'{"password": "********", "db": 1}'"""),
        ("redis://user:p/w", "'redis://user:********'"),
        ("redis://user:123456", "'redis://user:********'"),
        ({"pw": "x", "db_pw": "x"}, "{'pw': '********', 'db_pw': '********'}"),
        ("redis://h?pw=x&spw=1", "'redis://h?pw=********&spw=1'"),
    ],
)  # fmt: skip
def test_a_credential_is_hidden(value, text):
    assert redacted(value) == text


@pytest.mark.parametrize(
    "value",
    [
        *("redis://h:6379/0", "redis://[::1]:6379", "unix:///run/s?db=1", "h1:2181,h2/chroot"),
        *("", None, 7, 0.5, True, [], (), set(), frozenset(), {}, {"password": None}, timedelta(1)),
        *(["a", "b"], ("a", 1), {"KEY_PREFIX": "dlock"}, b"\xff", "é"),
    ],
)  # fmt: skip
def test_anything_else_is_shown_as_it_is(value):
    assert redacted(value) == (repr(value) if value != frozenset() else redacted(value))


def test_secrets_of_clients_are_used_and_not_shown():
    assert SecretText("pw").encode() == b"pw"
    assert SecretBytes(b"pw") + b"" == b"pw"
    assert repr(SecretText("pw")) == repr(SecretBytes(b"pw")) == repr(HIDDEN)


# -- messages of the settings ----------------------------------------------------------------


def entries(separator: str) -> Iterator[Any]:
    """Values of ``DLOCKS`` with a password at a place where it may be, or be put by mistake."""
    secret = f"XYZ{separator}UVW"
    url, user = f"redis://:{secret}@h/0", f"me:{secret}@host:2181"
    yield from (url, url.encode(), [url], {"default": url}, {"default": [url]})
    # redis-py itself refuses the second parameter.
    wrong = f"redis://h?password={quote(secret)}&socket_timeout=x"
    for options in ({}, {"sentinels": [("h", 1)], "service_name": "s"}):
        entry = {"BACKEND": BACKENDS["redis"], "LOCATION": wrong, "OPTIONS": options}
        yield {"default": entry}
    for value in (url, url.encode(), {url: 1}):
        yield {"default": {"BACKEND": value}}
    for backend in BACKENDS.values():
        for value in (url, user, url.encode(), [url], (url, user), [b"x", url.encode()], {url: 1}):
            for key in ("LOCATION", "CACHE", "OPTIONS", "TTL", "WAIT", "KEY_PREFIX"):
                yield {"default": {"BACKEND": backend, key: value}}
            yield {"default": {"BACKEND": backend, "IF_UNAVAILABLE": value}}
        yield {"default": {"BACKEND": backend, url: 1}}
        options = [{url: 1}, {"password": secret, "PASSWORD": secret}, {"credentials": secret}]
        for key in (
            *("client", "connection_kwargs", "sentinel_kwargs", "cluster_nodes", "replicas"),
            *("max_connections", "session_timeout", "command_timeout", "database", "connections"),
            *("proof", "poll_interval", "primary", "standby", "max_ttl", "clock_drift", "view_ttl"),
        ):
            options += [{key: url}, {key: [url]}, {key: [("password", secret)]}, {key: {url: 1}}]
        for given in options:
            yield {"default": {"BACKEND": backend, "LOCATION": "h:1", "OPTIONS": given}}
            yield {"default": {"BACKEND": backend, "LOCATION": "redis://h", "OPTIONS": given}}


def told_at_first_use(*, page: bool) -> str:
    """The options, or the error with its traceback and, if asked for, its error page."""
    locks.reset()
    try:
        assert locks["default"]
        return repr(conf.alias_options("default"))
    except InvalidLockBackend as error:
        told = "".join(traceback.format_exception(error))
        return told + error_page(error) if page else told


@pytest.mark.parametrize("separator", SEPARATORS)
def test_no_message_about_the_settings_has_a_password(separator):
    for value in entries(separator):
        with override_settings(DLOCKS=value):
            for message in checks.check_settings():
                assert not is_told(f"{message.msg} {message.hint}"), value
            # Making a page takes long, and the separator makes no difference to it.
            assert not is_told(told_at_first_use(page=not separator)), value


@pytest.mark.parametrize("separator", SEPARATORS)
def test_no_message_about_a_cache_has_its_password(separator):
    url = f"redis://:XYZ{separator}UVW@h/0"
    for location in (url, [url], f"redis://h,{url}"):
        caches = {
            "default": {
                "BACKEND": "django.core.cache.backends.redis.RedisCache",
                "LOCATION": location,
            }
        }
        with override_settings(CACHES=caches, DLOCKS=None):
            assert not is_told(told_at_first_use(page=True)), location


@pytest.mark.parametrize("value", ["x://:XYZ@h", {"TASK_URL": "x://:XYZ@h"}, {"x://:XYZ@h": 1}])
def test_no_message_about_other_settings_has_a_password(value):
    for setting, read in [
        ("DLOCK_ADMIN", task_url.read),
        ("DLOCK_METRICS", config.read),
        ("DLOCK_TRACING", tracing_setting.tracer_class),
    ]:
        with pytest.raises(ImproperlyConfigured) as caught, override_settings(**{setting: value}):
            read()
        assert not is_told(str(caught.value)), setting


def test_the_repr_of_the_options_tells_all_but_the_passwords():
    options = AliasOptions(
        *("default", "shop.Backend"),
        location=("redis://:XYZ@h1", "redis://me:XYZ@h2"),
        options={"password": "XYZ", "username": "me", "replicas": 1},
    )
    shown = repr(options)
    assert shown.startswith("AliasOptions(alias='default', backend='shop.Backend', cache=None")
    assert "location=('redis://********@h1', 'redis://********@h2')" in shown
    assert "options={'password': '********', 'username': 'me', 'replicas': 1}" in shown


# -- error pages -----------------------------------------------------------------------------


def error_page(error: BaseException) -> str:
    """The variables of all frames but those of tests, as Django shows them to admins."""
    request = RequestFactory().get("/")
    reporter = ExceptionReporter(request, type(error), error, error.__traceback__)
    with override_settings(DEBUG=False):
        frames = reporter.get_traceback_data()["frames"]
    return "\n".join(
        f"{name} = {value}"
        for frame in frames
        if "/tests/" not in frame.get("filename", "")
        for name, value in frame.get("vars", ())
    )


def test_the_page_of_an_unknown_alias_shows_no_settings():
    entry = {"BACKEND": BACKENDS["redis"], "LOCATION": "redis://:XYZ@h"}
    with override_settings(DLOCKS={"default": entry}):
        with pytest.raises(InvalidLockBackend) as caught:
            assert locks["other"]
        page = error_page(caught.value)
    assert "alias = 'other'" in page
    assert not is_told(page)


def test_the_page_of_a_client_that_cannot_be_made_shows_no_credentials():
    from django_dlock.backends.zookeeper.config import ZooKeeperOptions
    from django_dlock.backends.zookeeper.session import Session

    options = AliasOptions(
        *("default", BACKENDS["zookeeper"]),
        location="127.0.0.1:1",
        options={"credentials": "me:XYZ", "client": {"nonsense": 1}},
    )
    with pytest.raises(TypeError) as caught:
        Session(options, ZooKeeperOptions.read(options), lambda *_: None)
    page = error_page(caught.value)
    assert "auth_data" in page
    assert not is_told(page)


def test_the_credentials_of_zookeeper_are_not_in_the_log_of_its_client(caplog):
    from kazoo.protocol.serialization import Auth

    from django_dlock.backends.zookeeper.config import ZooKeeperOptions, client_arguments

    options = AliasOptions(
        *("default", BACKENDS["zookeeper"]), location="h", options={"credentials": "me:XYZ"}
    )
    ((scheme, auth),) = client_arguments(options, ZooKeeperOptions.read(options))["auth_data"]
    request = Auth(0, scheme, auth)
    # So kazoo logs what it sends.
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("kazoo.client").debug("Sending request(xid=%s): %s", -4, request)
    assert not is_told(caplog.text)
    assert b"me:XYZ" in request.serialize()


@contextmanager
def closing_server() -> Iterator[int]:
    """Reads a request, and closes the connection without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def etcd_at(port: int) -> AliasOptions:
    return AliasOptions(
        *("default", BACKENDS["etcd"]),
        location=f"http://127.0.0.1:{port}",
        options={"username": "me", "password": "XYZ"},
    )


def test_the_page_of_an_etcd_that_cannot_be_reached_shows_no_password():
    backend = EtcdBackend(etcd_at(free_port()))
    with pytest.raises(BackendUnavailable) as caught:
        backend.locked("it", deadline=clock.now() + 1)
    page = error_page(caught.value)
    assert "_authenticate" in "".join(traceback.format_exception(caught.value))
    assert not is_told(page)


def test_the_page_of_an_etcd_that_closes_the_connection_shows_no_password():
    with closing_server() as port, pytest.raises(BackendUnavailable) as caught:
        options = etcd_at(port)
        Client(options, EtcdOptions.read(options)).stream("/v3/watch", {}, timeout=1)
    page = error_page(caught.value)
    assert "content = " in page
    assert not is_told(page)


# -- passwords on the network ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "options", "told"),
    [
        ("http://etcd-1:2379", {"username": "me", "password": "XYZ"}, ["http://etcd-1:2379"]),
        (
            ["http://127.0.0.1:2379", "http://10.0.0.1"],
            {"username": "me", "password": "XYZ"},
            ["http://10.0.0.1:2379"],
        ),
        ("http://[fd00::1]:2379", {"username": "me", "password": "XYZ"}, ["http://[fd00::1]:2379"]),
        ("https://etcd-1:2379", {"username": "me", "password": "XYZ"}, []),
        ("http://etcd-1:2379", {}, []),
        ("http://localhost:2379", {"username": "me", "password": "XYZ"}, []),
        ("http://127.0.0.1:2379", {"username": "me", "password": "XYZ"}, []),
        ("http://[::1]:2379", {"username": "me", "password": "XYZ"}, []),
    ],
)
def test_a_password_of_etcd_on_a_plain_network_is_a_warning(monkeypatch, location, options, told):
    # It is known without an answer.
    monkeypatch.setattr(EtcdBackend, "store_problems", lambda backend: ())
    entry = {"BACKEND": BACKENDS["etcd"], "LOCATION": location, "OPTIONS": options}
    with override_settings(DLOCKS={"default": entry}):
        found = [each for each in checks.check_deployment() if each.id == "django_dlock.W016"]
    assert len(found) == bool(told)
    for message in found:
        assert all(address in message.msg for address in told)
        assert "127.0.0.1" not in message.msg
        assert "https://" in str(message.hint)
        assert not is_told(f"{message.msg} {message.hint}")


def test_the_warning_does_not_wait_for_an_answer():
    def away(backend):
        raise BackendUnavailable("nobody answers", "", "default")

    entry = {
        "BACKEND": BACKENDS["etcd"],
        "LOCATION": "http://etcd-1:2379",
        "OPTIONS": {"username": "me", "password": "XYZ"},
    }
    with pytest.MonkeyPatch.context() as patch, override_settings(DLOCKS={"default": entry}):
        patch.setattr(EtcdBackend, "store_problems", away)
        assert [each.id for each in checks.check_deployment()] == [
            "django_dlock.W016",
            "django_dlock.W008",
        ]
