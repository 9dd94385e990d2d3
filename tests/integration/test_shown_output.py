"""What commands print is what the guides show, except for the numbers that differ by machine."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from django.core.management import call_command

from testproject.servers import RedisServer
from tests.support.aliases import configured
from tests.support.redis_calls import client

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"


def without_numbers(output: str) -> list[str]:
    text = re.sub(r"\d+(\.\d+)*", "N", output)
    return re.sub(r"\b(ahead of|behind) that\b", "beside that", text).splitlines()


@pytest.mark.django_db
def test_the_diagnosis_is_as_the_guide_shows_it(own_redis: RedisServer) -> None:
    page = (HOWTO / "nothing-moves.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    with client(own_redis) as server:
        server.config_set("maxmemory", "256mb")
        server.config_set("maxmemory-policy", "allkeys-lru")
        server.config_set("appendonly", "yes")
    backend = "django_dlock.backends.redis.RedisBackend"
    out = io.StringIO()
    with configured({"default": {"BACKEND": backend, "LOCATION": own_redis.url}}):
        call_command("diagnose_locks", using="default", stdout=out)
    assert without_numbers(out.getvalue()) == without_numbers(shown)
