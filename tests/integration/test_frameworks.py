"""Both decorators at each place of a view, in each framework; the table of the docs."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_dlock import Lock, idempotent_view, locked_view
from django_dlock.testing import local_locks
from tests.frameworks import id_of
from tests.support.placements import EARLY, NAME, PLACES, REFUSED, TOKEN, WORKS, Place, calls

pytestmark = pytest.mark.django_db(transaction=True)

KNOWN = {"Authorization": f"Bearer {TOKEN}"}
STRANGER = {302, 401, 403}


@pytest.fixture(autouse=True)
def local() -> Iterator[None]:
    calls.clear()
    with local_locks():
        yield


class Site:
    """A site with the views of one place, and two clients: a known one, and a stranger."""

    def __init__(self, place: Place, guard: Any, settings: Any) -> None:
        settings.ROOT_URLCONF = ModuleType("urls_of_a_placement")
        settings.ROOT_URLCONF.urlpatterns = place.urls(guard)
        self.path = "/7/pay/" if "`action`" in place.where else "/7/"
        self.known, self.stranger = Client(headers=KNOWN), Client()
        self.known.force_login(User.objects.create(username="known"))

    def post(self, client: Client, key: str = "k1") -> Any:
        headers = {"idempotency-key": key, "accept": "application/json"}
        return client.post(
            self.path, {"amount": 1}, content_type="application/json", headers=headers
        )


def outcome_of_lock(place: Place, settings: Any) -> str:
    try:
        site = Site(place, locked_view("placement:{number}"), settings)
    except TypeError:
        return REFUSED
    assert site.post(site.known).status_code == 201
    assert calls == [True]
    with Lock(NAME, bound=False):
        assert site.post(site.known).status_code == 409
        stranger = site.post(site.stranger).status_code
    assert not Lock(NAME).locked()
    assert site.post(site.stranger).status_code in STRANGER
    assert calls == [True]
    return EARLY if stranger == 409 else WORKS if stranger in STRANGER else str(stranger)


def outcome_of_record(place: Place, settings: Any) -> str:
    guard = idempotent_view(client="all", required=True)
    try:
        site = Site(place, guard, settings)
    except TypeError:
        return REFUSED
    first, again = site.post(site.known), site.post(site.known)
    assert [answer.status_code for answer in (first, again)] == [201, 201]
    assert first.content == again.content
    assert first["Content-Type"] == again["Content-Type"]
    assert ("Idempotent-Replayed" in first, again["Idempotent-Replayed"]) == (False, "true")
    stranger = site.post(site.stranger).status_code
    assert site.post(site.stranger, "k2").status_code in STRANGER
    assert len(calls) == 1
    return EARLY if stranger == 201 else WORKS if stranger in STRANGER else str(stranger)


IDS = [id_of(place) for place in PLACES]


@pytest.mark.parametrize("place", PLACES, ids=IDS)
def test_locked_view_does_at_each_place_what_the_docs_say(place: Place, settings: Any) -> None:
    assert outcome_of_lock(place, settings) == place.locked


@pytest.mark.parametrize("place", PLACES, ids=IDS)
def test_g12_idempotent_view_does_at_each_place_what_the_docs_say(
    place: Place, settings: Any
) -> None:
    assert outcome_of_record(place, settings) == place.idempotent
