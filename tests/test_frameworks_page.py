"""``docs/reference/frameworks.md`` says what the tests have tried, and on which versions."""

from __future__ import annotations

import configparser
import re

import django
import ninja
import rest_framework
from django.contrib.auth.models import User
from django.http import HttpRequest
from django.test import RequestFactory

from django_dlock import Lock
from tests import frameworks
from tests.frameworks import PAGE, ROOT
from tests.support.placements import PLACES
from tests.test_docs import Read, read

__all__ = ["read"]

TEXT = PAGE.read_text()


def versions(package: str) -> list[str]:
    row = re.search(rf"^\| {package} \| (.*) \|$", TEXT, re.MULTILINE)
    assert row, package
    return re.findall(r"\d+\.\d+", row[1])


def test_the_table_is_that_of_the_tests() -> None:
    assert TEXT.partition(frameworks.HEADING)[2] == frameworks.section(), (
        "run: python -m tests.frameworks"
    )


def test_each_place_has_a_name_of_its_own() -> None:
    names = [frameworks.id_of(place) for place in PLACES]
    assert len(names) == len(set(names))


def test_these_versions_are_among_those_of_the_page() -> None:
    """The other ones are those of ``tox.ini``."""
    for package, version in {
        "Django": django.__version__,
        "Django REST framework": rest_framework.__version__,
        "django-ninja": ninja.__version__,
    }.items():
        assert ".".join(version.split(".")[:2]) in versions(package), package


def test_the_versions_of_the_page_are_those_of_tox() -> None:
    tox = (ROOT / "tox.ini").read_text()
    assert versions("Django") == re.findall(r"^    django\d+: Django>=([\d.]+),", tox, re.MULTILINE)
    oldest = re.findall(r"^    drf\d+: djangorestframework>=([\d.]+),", tox, re.MULTILINE)
    assert versions("Django REST framework")[:-1] == oldest
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    told = re.findall(r"Django :: (\d+\.\d+)", setup["metadata"]["classifiers"])
    assert versions("Django") == told


def test_the_samples_of_django_ninja_work(read: Read) -> None:
    page = read("docs/reference/frameworks.md")
    operations = {
        path: view.operations[0]
        for path, view in page["api"].default_router.path_operations.items()
    }
    for operation in operations.values():
        operation.api = page["api"]

    def request(method: str) -> HttpRequest:
        body = '{"order": 7, "amount": 5}' if method == "POST" else ""
        headers = {"idempotency-key": "k1"}
        made = RequestFactory().generic(method, "/", body, "application/json", headers=headers)
        made.user, made._dont_enforce_csrf_checks = User(pk=1), True
        return made

    paid = [operations["/payments"].run(request("POST")) for _ in range(2)]
    assert [(answer.status_code, answer.content) for answer in paid] == [(201, b'{"paid": 5}')] * 2
    assert paid[1]["Idempotent-Replayed"] == "true"
    with Lock("order:7", bound=False):
        assert operations["/refunds"].run(request("POST")).status_code == 409
    stream = operations["/lines/{number}"].run(request("GET"), number=3)
    assert Lock("lines:3").locked()
    assert b"".join(stream.streaming_content).split() == [b'{"paid":', b"3}"]
    stream.close()
