"""Renewals that are sent now and answered later: the protocol, and a version for any backend."""

from __future__ import annotations

from concurrent import futures
from concurrent.futures import Future
from typing import Protocol

from ..lease import RenewalResult

RenewalResults = list[RenewalResult]


class PendingRenewal(Protocol):
    """A renewal that was sent and may not be answered yet.

    One renewal thread serves all aliases, so it must not wait long for any of them.
    """

    def wait(self, timeout: float) -> bool:
        """Wait for at most ``timeout`` seconds; returns whether ``result`` can answer at once."""

    def result(self) -> RenewalResults:
        """One result per renewal, in order.

        Raises:
            BackendUnavailable: No answer; each lease may or may not be prolonged.
        """

    def abandon(self) -> None:
        """Stop waiting for the answer and free resources; never blocks, never raises."""


class SubmittedRenewal:
    """A blocking ``renew`` on another thread."""

    def __init__(self, call: Future[RenewalResults]) -> None:
        self._call = call

    def wait(self, timeout: float) -> bool:
        return bool(futures.wait([self._call], timeout).done)

    def result(self) -> RenewalResults:
        try:
            return self._call.result()
        finally:
            del self

    def abandon(self) -> None:
        """A call that has begun ends at its deadline, and its answer is ignored."""
        self._call.cancel()
