"""The page on personal data names every place where a value of a person may be."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from django.apps import apps
from django.contrib.auth.models import Permission

from django_dlock.backends.redis import keys as redis_keys
from django_dlock.celery.publishing.header import HEADER, RequeueHeader
from django_dlock.log import FIELDS
from django_dlock.models import LockStatistics

pytestmark = pytest.mark.project

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/howto/personal-data.md").read_text()
NAMED = set(re.findall(r"`([^`\n]+)`", TEXT.replace("```", "")))

MODELS = [
    model for model in apps.get_app_config("django_dlock").get_models() if model._meta.managed
]


def part_about(table: str) -> str:
    """From the line that names the table to the next heading or table."""
    begin = TEXT.index(f"\n`{table}`")
    ends = [
        found.start() for found in re.finditer(r"\n##|\n`django_", TEXT) if found.start() > begin
    ]
    return TEXT[begin : min(ends)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_column_is_on_the_page(model):
    columns = {field.name for field in model._meta.concrete_fields}
    named = set(re.findall(r"`(\w+)`", part_about(model._meta.db_table)))
    if model is LockStatistics:
        columns -= set(LockStatistics.BUCKETS[1:-1])
    assert columns <= named


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_column_of_the_page_exists(model):
    rows = re.findall(r"^\* (`.*?`):", part_about(model._meta.db_table), re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(rows)))
    assert named
    assert named <= {field.name for field in model._meta.concrete_fields}


def test_every_key_of_redis_is_on_the_page():
    keys = set(re.findall(r"``…(:[\w:<>]+)``", redis_keys.__doc__ or ""))
    assert len(keys) >= 6
    assert {f"…{key}" for key in keys} <= NAMED


def test_every_attribute_of_a_span_and_of_a_line_is_on_the_page():
    source = (ROOT / "django_dlock/core/tracing.py").read_text()
    spans = set(re.findall(r'"(dlock\.\w+)"', source))
    assert len(spans) >= 5
    assert spans | set(FIELDS) <= NAMED


def test_every_label_of_a_metric_is_on_the_page():
    page = (ROOT / "docs/reference/metrics.md").read_text()
    labels = set()
    for row in re.findall(r"^\| `django_dlock.*$", page, re.MULTILINE):
        labels |= set(re.findall(r"`(\w+)`", row.split(" | ")[3]))
    assert "group" in labels
    assert labels <= NAMED


def test_every_entry_of_the_header_is_on_the_page():
    assert {HEADER, *(field.name for field in dataclasses.fields(RequeueHeader))} <= NAMED


@pytest.mark.django_db
def test_every_permission_of_the_page_exists():
    named = {name for name in NAMED if re.fullmatch(r"(view|rerun|forget|publish)_\w+", name)}
    known = set(Permission.objects.values_list("codename", flat=True))
    assert {"view_results_idempotencyrecord", "view_lockevent"} <= named <= known
