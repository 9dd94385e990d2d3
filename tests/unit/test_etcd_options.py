"""Which settings of the etcd backend are refused, and how it tells its keys apart."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from django.test import override_settings

from django_dlock import InvalidLockBackend, conf, locks
from django_dlock.backends.base import AliasOptions
from django_dlock.backends.etcd import EtcdBackend
from django_dlock.backends.etcd.config import members
from django_dlock.backends.etcd.entries import Entry, encoded, prefix_of, range_after, value_of

PATH = "django_dlock.backends.etcd.EtcdBackend"
URL = "https://etcd-1:2379"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"location": None}, " has no 'LOCATION'"),
        ({"location": None, "cache": "default"}, " has 'CACHE', which this backend does not take"),
        ({"location": "etcd-1:2379"}, "['LOCATION'] has a URL that is not http://host:port"),
        ({"location": "redis://etcd-1:2379"}, "['LOCATION'] has a URL that is not http://host"),
        ({"location": "http://etcd-1:port"}, "['LOCATION'] has a URL that is not http://host"),
        ({"location": (URL, "https://")}, "['LOCATION'] has a URL that is not http://host"),
        ({"location": (URL, "http://etcd-2:2379")}, "['LOCATION'] mixes http:// and https://"),
        ({"location": "http://me:secret@etcd-1:2379"}, "['LOCATION'] has a user in a URL"),
        ({"location": "http://etcd-1:2379/v3"}, "['LOCATION'] has a URL with something behind"),
    ],
)
def test_a_wrong_location_is_reported_without_its_password(
    given: dict[str, Any], told: str
) -> None:
    problem = EtcdBackend.problems(AliasOptions("it", "etcd", **given))[0]
    assert problem.id == "E006"
    assert problem.message.startswith(f"DLOCKS['it']{told}")
    assert problem.hint
    assert "secret" not in problem.message + problem.hint


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"user": "me"}, "['OPTIONS'] has the unknown key 'user'; did you mean 'username'?"),
        ({"ca_cert": 1}, "['OPTIONS']['ca_cert'] is 1."),
        ({"ca_cert": ""}, "['OPTIONS']['ca_cert'] is ''."),
        ({"username": "me"}, "['OPTIONS'] has 'username', but no 'password'."),
        ({"password": "secret"}, "['OPTIONS'] has 'password', but no 'username'."),
        ({"client_key": "key"}, "['OPTIONS'] has 'client_key', but no 'client_cert'."),
    ],
)
def test_a_wrong_option_is_reported_with_its_setting(given: dict[str, Any], told: str) -> None:
    (problem,) = EtcdBackend.problems(AliasOptions("it", "etcd", location=URL, options=given))
    assert (problem.id, problem.message) == ("E008", f"DLOCKS['it']{told}")
    assert problem.hint
    assert "secret" not in problem.message + problem.hint


def test_tls_is_not_forgotten_in_the_url() -> None:
    given = {"ca_cert": "ca.pem"}
    plain = AliasOptions("it", "etcd", location="http://etcd-1:2379", options=given)
    (problem,) = EtcdBackend.problems(plain)
    assert "['ca_cert'], but a URL in LOCATION is http://" in problem.message


def test_right_settings_are_no_problem() -> None:
    given = {"username": "me", "password": "secret", "ca_cert": "ca.pem", "client_cert": "me.pem"}
    options = AliasOptions("it", "etcd", location=(URL, "https://[::1]/"), options=given)
    assert EtcdBackend.problems(options) == []
    assert [str(member) for member in members(options)] == [URL, "https://[::1]:2379"]


def test_a_missing_client_is_reported_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("django_dlock.backends.etcd", "urllib3")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "urllib3", None)
    with override_settings(DLOCKS={"default": {"BACKEND": PATH, "LOCATION": URL}}):
        (problem,) = conf.problems()
        assert (problem.id, problem.hint) == ("E008", 'pip install "django-dlock[etcd]"')
        locks.reset()
        with pytest.raises(InvalidLockBackend, match=r"django-dlock\[etcd\]"):
            locks["default"]
    locks.reset()


def test_prefixes_that_contain_one_another_share_no_key() -> None:
    assert prefix_of("dlock") == "dlock/1/"
    assert prefix_of("a") + "1/x" != prefix_of("a/1") + "x"
    begin, end = encoded(prefix_of("shop:a")), range_after(prefix_of("shop:a"))
    assert (begin, end) == (encoded("shop:a/1/"), encoded("shop:a/10"))


def test_a_value_of_another_program_is_read_all_the_same() -> None:
    found = {"create_revision": "5", "mod_revision": "7", "value": encoded("something\nelse")}
    entry = Entry.parse(found)
    assert (entry.owner, entry.token, entry.revision, entry.lease) == ("something", 5, 7, 0)
    assert (entry.kind, entry.number("ttl"), entry.process) == ("held", 0, None)
    ours = value_of("me", {"kind": "parked", "ttl": "much"}, "{}", '{"note": "ü"}')
    entry = Entry.parse({**found, "value": ours})
    assert (entry.owner, entry.kind, entry.number("ttl")) == ("me", "parked", 0)
    assert entry.metadata == '{"note": "ü"}'
