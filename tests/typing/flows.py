"""Calls of a backend in flows, as ``mypy --strict`` must accept and refuse them."""

from __future__ import annotations

from typing_extensions import assert_type

from django_dlock.backends.base import BaseLockBackend, RenewalResults
from django_dlock.core.flow import Flow, adrive, call, drive, either, in_turn, pause
from django_dlock.lease import Contention, Lease, LeaseInfo, LeaseRequest, Outcome


def flow(backend: BaseLockBackend, request: LeaseRequest, end: float) -> Flow[bool]:
    answer = yield from call(backend.acquire, request, deadline=end)
    assert_type(answer, Lease | Contention)
    assert_type((yield from call(backend.get, request.name)), LeaseInfo | None)
    owner = request.owner
    released = in_turn(lambda: call(backend.release, "it", owner, min_hold=0.0, deadline=end))
    assert_type((yield from released), Outcome)
    renewed = yield from call(backend.renew, [], process="", deadline=end)
    assert_type(renewed, RenewalResults)
    yield from pause(0.1)
    return (yield from call(backend.locked, "it", deadline=end))


def waits(backend: BaseLockBackend, request: LeaseRequest, met: Contention) -> Flow[Lease | None]:
    return (
        yield from either(
            backend.wait, backend.async_wait, request, met, until=1.0, interrupted=bool
        )
    )


async def another(number: int) -> LeaseInfo | None:
    """No counterpart of ``get``: it takes another argument."""
    return None


def refused(backend: BaseLockBackend, request: LeaseRequest, end: float) -> Flow[str]:
    yield from call("acquire", request, deadline=end)  # type: ignore[arg-type]
    yield from call(backend.acquire, "it", deadline=end)  # type: ignore[arg-type]
    yield from call(backend.acquire, request)  # type: ignore[call-arg]
    yield from call(backend.acquire, request, deadline=end, owner="")  # type: ignore[call-arg]
    yield from call(backend.release, "it", "me", min_hold="", deadline=end)  # type: ignore[arg-type]
    yield from either(backend.get, backend.get, "it")  # type: ignore[arg-type]
    yield from either(backend.get, another, "it")  # type: ignore[arg-type]
    yield "acquire", (request,), {}  # type: ignore[misc]
    in_turn(backend.locked)  # type: ignore[arg-type]
    name: str = yield from call(backend.get, "it")  # type: ignore[assignment]
    return name


async def run(backend: BaseLockBackend, request: LeaseRequest) -> None:
    assert_type(drive(flow(backend, request, 1.0)), bool)
    assert_type(await adrive(flow(backend, request, 1.0), backend), bool)
    assert_type(await backend.acall(backend.get, "it"), LeaseInfo | None)
    await backend.acall("get", "it")  # type: ignore[arg-type]
    await backend.acall(backend.get, 42)  # type: ignore[arg-type]
    await backend.acall(backend.acquire, request)  # type: ignore[call-arg]
