"""An address of a lock's page that names no lock leads to the list, whatever the store."""

from __future__ import annotations

import pytest
from django.contrib.admin.utils import quote
from django.urls import reverse

from tests.integration.test_operators_on_quorum_stores import LIST
from tests.support.aliases import configured

pytestmark = pytest.mark.django_db(databases="__all__")

NAMES = ["a\0b", "n" * 256, "line\nbreak", ""]


@pytest.fixture(params=["redis", "zookeeper", "etcd", "postgres", "mariadb"])
def store(request):
    """The settings of an alias on a real store."""
    kind = request.param
    value = request.getfixturevalue
    if kind in ("postgres", "mariadb"):
        backend, location = "database.DatabaseBackend", value(f"{kind}_alias")
    elif kind == "redis":
        backend, location = "redis.RedisBackend", value("own_redis").url
    elif kind == "etcd":
        backend, location = "etcd.EtcdBackend", value("etcd_server").url
    else:
        backend, location = "zookeeper.ZooKeeperBackend", value("zookeeper_server").location
    entry = {"BACKEND": f"django_dlock.backends.{backend}", "LOCATION": location}
    with configured({"default": entry}):
        yield kind


@pytest.mark.usefixtures("store")
def test_what_can_be_no_name_leads_to_the_list(admin_client):
    for name in NAMES:
        address = reverse("admin:django_dlock_heldlock_change", args=[quote(f"default/{name}")])
        response = admin_client.get(address, follow=True)
        assert response.redirect_chain == [(LIST, 302)], name
        (message,) = map(str, response.context["messages"])
        assert message.startswith("A lock's name must"), name
