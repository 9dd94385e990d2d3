"""System checks that query a Redis."""

from __future__ import annotations

from typing import Any

import redis
from django.test import override_settings

from django_dlock import checks
from testproject.servers import RedisServer


def entry(location: str) -> dict[str, Any]:
    backend = "django_dlock.backends.redis.RedisBackend"
    return {"default": {"BACKEND": backend, "LOCATION": location}}


def test_w003_a_redis_that_evicts_keys_when_it_is_full(own_redis: RedisServer) -> None:
    client = redis.Redis.from_url(own_redis.url)
    with override_settings(DLOCKS=entry(own_redis.url)):
        assert checks.check_deployment() == []
        client.config_set("maxmemory-policy", "volatile-ttl")
        # Without a memory limit it is never full.
        assert checks.check_deployment() == []
        client.config_set("maxmemory", "100mb")
        (warning,) = checks.check_deployment()
        assert warning.id == "django_dlock.W003"
        assert "'volatile-ttl'" in warning.msg
        client.config_set("maxmemory-policy", "noeviction")
        assert checks.check_deployment() == []


def test_w006_a_user_that_may_not_subscribe(own_redis: RedisServer) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        rules = ("on", ">pw", "~*", "+@all", "resetchannels")
        client.execute_command("ACL", "SETUSER", "mute", *rules)
    url = own_redis.url.replace("redis://", "redis://mute:pw@")
    with override_settings(DLOCKS=entry(url)):
        (warning,) = checks.check_deployment()
    assert warning.id == "django_dlock.W006"
    assert "channel" in warning.msg
    assert "&{dlock:0}:2:m:*" in warning.hint


def test_w008_a_redis_that_refuses_connections(own_redis: RedisServer) -> None:
    own_redis.stop()
    with override_settings(DLOCKS=entry(own_redis.url)):
        (warning,) = checks.check_deployment()
    assert warning.id == "django_dlock.W008"
    assert "'default'" in warning.msg
    assert str(own_redis.port) in warning.msg


def test_w008_a_redis_that_refuses_the_database(own_redis: RedisServer) -> None:
    with override_settings(DLOCKS=entry(own_redis.url.rpartition("/")[0] + "/99")):
        (warning,) = checks.check_deployment()
    assert warning.id == "django_dlock.W008"
    assert "are refused" in warning.msg
    assert "user, password or database" in warning.hint
