"""A lock event is written whatever text a visitor or a store has given, on every database."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import models

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.local import LocalBackend
from django_dlock.lease import LeaseRequest
from django_dlock.models import LockEvent
from django_dlock.operators import audit

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

ODD = "/a\0b\ud800c\u202e/"
WRITTEN = "/a\\x00b\\ud800c\u202e/"


class ToChosen:
    alias = "default"

    def db_for_write(self, model: type[models.Model], **hints: Any) -> str:
        return self.alias


@pytest.fixture
def chosen(settings: Any, monkeypatch: pytest.MonkeyPatch, database: str) -> str:
    monkeypatch.setattr(ToChosen, "alias", database)
    settings.DATABASE_ROUTERS = [f"{__name__}.ToChosen"]
    return database


def test_a_break_is_written_whatever_the_path_of_the_request(chosen: str) -> None:
    """Otherwise a visitor could keep operators from releasing a lock."""
    backend = LocalBackend(AliasOptions(alias="local", backend=""))
    request = LeaseRequest(
        "order:42", "owner", 30.0, metadata='{"path": "/a\\u0000b\\ud800c\u202e/"}'
    )
    backend.acquire(request, deadline=backend.call_deadline())
    info = backend.get("order:42")
    assert info is not None
    assert info.metadata == {"path": ODD}
    audit.record_break(info, "operator")
    event = LockEvent.objects.using(chosen).get()
    assert event.detail["path"] == WRITTEN


def test_every_column_and_every_detail_can_be_stored(chosen: str) -> None:
    texts = dict.fromkeys(("name", "alias", "owner", "reason", "user"), ODD)
    others = {"held_for": 1.5, "pid": None}
    detail = {**others, **dict.fromkeys(("host", "scope", "key"), ODD)}
    audit.record(LockEvent.Event.LOST, **texts, detail=detail)
    event = LockEvent.objects.using(chosen).get()
    assert {getattr(event, name) for name in texts} == {WRITTEN}
    assert event.detail == {
        "held_for": 1.5,
        "pid": None,
        **dict.fromkeys(("host", "scope", "key"), WRITTEN),
    }
