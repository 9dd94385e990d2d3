"""Spans of locks and records, in OpenTelemetry's SDK."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from django_dlock import Lock, LockNotAcquired, locks
from django_dlock.core import dispatch, tracing
from django_dlock.exceptions import BackendUnavailable, LeaseLost, StaleToken
from django_dlock.lease import Renewal, RenewalResult
from django_dlock.operators.inspection import break_lease
from django_dlock.records import idempotency
from django_dlock.tracing.spans import OpenTelemetryTracer
from tests.support.databases import until

LOCAL = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend", "TTL": 3.0}}


class Spans:
    """What was exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        dispatch.flush()
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    with override_settings(DLOCKS=LOCAL, DLOCK_TRACING=True):
        # OpenTelemetry allows one provider in a process, so it is not set there.
        tracing.use(OpenTelemetryTracer(spans.provider))
        yield spans


def facts(span: ReadableSpan) -> dict[str, object]:
    return {key.removeprefix("dlock."): value for key, value in (span.attributes or {}).items()}


def is_child(span: ReadableSpan, parent: trace.Span | ReadableSpan) -> bool:
    context = parent.get_span_context() if isinstance(parent, trace.Span) else parent.context
    return (
        span.parent is not None
        and context is not None
        and ((span.parent.trace_id, span.parent.span_id) == (context.trace_id, context.span_id))
    )


def test_an_acquire_and_a_held_lease_are_children_of_the_callers_span(spans: Spans) -> None:
    with spans.tracer.start_as_current_span("request") as request, Lock("it") as lock:
        owner, token = lock.owner, lock.token
    acquire, hold = spans.one("django_dlock.acquire"), spans.one("django_dlock.hold")
    assert is_child(acquire, request)
    assert is_child(hold, request)
    assert facts(acquire) == {"name": "it", "alias": "default", "outcome": "acquired"}
    assert facts(hold) == {
        "name": "it",
        "alias": "default",
        "owner": owner,
        "token": token,
        "end": "released",
    }
    assert acquire.end_time == hold.start_time
    assert hold.status.status_code is StatusCode.UNSET


async def test_coroutines_have_their_own_parents(spans: Spans) -> None:
    async def hold(name: str) -> trace.Span:
        with spans.tracer.start_as_current_span(name) as span:
            async with Lock(name):
                await asyncio.sleep(0)
        return span

    parents = await asyncio.gather(hold("a"), hold("b"))
    found = {facts(span)["name"]: span for span in spans.named("django_dlock.hold")}
    assert is_child(found["a"], parents[0])
    assert is_child(found["b"], parents[1])


def test_waiting_is_the_time_of_the_acquire(spans: Spans) -> None:
    first = Lock("it", bound=False)
    first.acquire()
    before = time.time_ns()
    threading.Timer(0.2, first.release).start()
    with Lock("it", wait=30):
        after = time.time_ns()
    waited = spans.named("django_dlock.acquire")[1]
    assert waited.start_time is not None
    assert waited.end_time is not None
    assert before <= waited.start_time < waited.end_time <= after
    held = spans.named("django_dlock.hold")[0]
    assert held.end_time is not None
    assert waited.start_time < held.end_time


def test_an_acquire_that_finds_the_name_held_says_so(spans: Spans) -> None:
    with Lock("it", bound=False), pytest.raises(LockNotAcquired):
        Lock("it", wait=0, bound=False).__enter__()
    outcomes = [facts(span)["outcome"] for span in spans.named("django_dlock.acquire")]
    assert outcomes == ["acquired", "contended"]
    assert len(spans.named("django_dlock.hold")) == 1


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_acquire_without_an_answer_has_failed(
    spans: Spans, monkeypatch: pytest.MonkeyPatch, policy: Literal["raise", "skip"]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise BackendUnavailable("No answer", "it", "default")

    monkeypatch.setattr(locks["default"], "acquire", fail)
    with contextlib.nullcontext() if policy == "skip" else pytest.raises(BackendUnavailable):
        Lock("it", if_unavailable=policy).acquire(blocking=False)
    acquire = spans.one("django_dlock.acquire")
    assert facts(acquire)["outcome"] == "unavailable"
    assert acquire.status.status_code is StatusCode.ERROR
    assert "answer" in (acquire.status.description or "")


def test_an_interrupted_acquire_has_failed(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(locks["default"], "acquire", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Lock("it").acquire()
    assert facts(spans.one("django_dlock.acquire"))["outcome"] == "interrupted"


def test_a_lost_lease_ends_its_span_with_the_reason(spans: Spans) -> None:
    lock = Lock("it")
    lock.acquire()
    info = locks["default"].get("it")
    assert info is not None
    assert break_lease(info, reason="operator")
    until(lambda: lock.lost)
    hold = spans.one("django_dlock.hold")
    assert facts(hold)["end"] == "broken"
    assert hold.status.status_code is StatusCode.ERROR


def test_renewals_are_children_of_the_held_lease(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, answers = locks["default"], iter(["unanswered", "renewed", "renewed"])

    def renew(renewals: list[object], **_: object) -> list[RenewalResult]:
        outcome = next(answers, "renewed") if renewals else "renewed"
        return [RenewalResult(outcome, 3.0) for _ in renewals]  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "renew", renew)
    with Lock("it"):
        until(lambda: len(spans.named("django_dlock.renew")) == 2)
    hold = spans.one("django_dlock.hold")
    failed, confirmed = spans.named("django_dlock.renew")[:2]
    assert is_child(failed, hold)
    assert is_child(confirmed, hold)
    assert failed.status.status_code is StatusCode.ERROR
    assert confirmed.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("by", ["a thread", "a coroutine"])
def test_renewals_by_the_holder_are_children_of_the_held_lease(
    spans: Spans, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    outcomes: list[Any] = ["renewed", "unanswered", "expired"]

    def renew(renewals: list[Renewal], **_: object) -> list[RenewalResult]:
        return [RenewalResult(outcomes.pop(0), 600.0) for _ in renewals]

    def renew_again() -> None:
        if by == "a thread":
            lock.renew()
        else:
            asyncio.run(lock.arenew())

    monkeypatch.setattr(locks["default"], "renew", renew)
    lock = Lock("it", ttl=600)
    lock.acquire()
    renew_again()
    with pytest.raises(BackendUnavailable):
        renew_again()
    with pytest.raises(LeaseLost):
        renew_again()
    hold, made = spans.one("django_dlock.hold"), spans.named("django_dlock.renew")
    assert all(is_child(span, hold) for span in made)
    assert [(span.status.status_code, span.status.description) for span in made] == [
        (StatusCode.UNSET, None),
        (StatusCode.ERROR, "BackendUnavailable"),
        (StatusCode.ERROR, "expired"),
    ]


@pytest.mark.django_db
def test_claim_and_completion_of_a_record(spans: Spans) -> None:
    request = idempotency.ClaimRequest(
        "scope", "key", "payload", timedelta(days=1), "default", "it", "owner"
    )
    with spans.tracer.start_as_current_span("task") as task:
        claim = idempotency.claim(request, holds=lambda *_: False)
        assert isinstance(claim, idempotency.Claim)
        idempotency.complete(claim)
        idempotency.claim(request, holds=lambda *_: False)
        with pytest.raises(StaleToken):
            idempotency.complete(claim)
    first, second = spans.named("django_dlock.claim")
    assert is_child(first, task)
    assert [facts(first)["outcome"], facts(second)["outcome"]] == ["claimed", "finished"]
    assert facts(first)["key"] == "key"
    done, stale = spans.named("django_dlock.complete")
    assert facts(done)["attempt"] == 1
    assert done.status.status_code is StatusCode.UNSET
    assert stale.status.status_code is StatusCode.ERROR


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_ends_no_span_of_its_parent(spans: Spans) -> None:
    with Lock("it") as lock:
        dispatch.flush()
        pid = os.fork()
        if not pid:
            lock.lost  # noqa: B018 - notices the fork
            dispatch.flush()
            os._exit(len(spans.exporter.get_finished_spans()) - 1)
        # Only the span of the acquire is complete in the child.
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert facts(spans.one("django_dlock.hold"))["end"] == "released"


def test_an_exporter_that_raises_or_blocks_delays_no_caller(spans: Spans) -> None:
    goes_on = threading.Event()

    class Blocking(SimpleSpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            goes_on.wait(30)
            raise ValueError("full")

    spans.provider.add_span_processor(Blocking(InMemorySpanExporter()))
    try:
        with Lock("it"):
            pass
        # The first span still blocks the thread of spans.
        assert not goes_on.is_set()
    finally:
        goes_on.set()
    with Lock("other"):
        pass
    assert len(spans.named("django_dlock.hold")) == 2


def test_nothing_is_noted_without_the_setting() -> None:
    with override_settings(DLOCKS=LOCAL, DLOCK_TRACING=False):
        assert tracing.begin("it", "default") is None


def test_a_wrong_setting_says_what_is_allowed() -> None:
    with (
        pytest.raises(
            ImproperlyConfigured, match=r"DLOCK_TRACING is 'yes'; it takes True or False"
        ),
        override_settings(DLOCK_TRACING="yes"),
    ):
        pass


def test_a_missing_library_names_the_extra() -> None:
    program = (
        "import sys, django\n"
        "sys.modules['opentelemetry'] = None\n"
        "from django.conf import settings\n"
        "settings.configure(INSTALLED_APPS=['django.contrib.contenttypes', 'django_dlock'],\n"
        "                   DLOCK_TRACING=True)\n"
        "django.setup()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert 'pip install "django-dlock[opentelemetry]"' in done.stderr
