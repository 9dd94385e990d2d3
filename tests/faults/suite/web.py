"""The suite's views under uvicorn, and clients that go away in the middle of a request."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING

from testproject.processes import HOST, OwnProcess

from .journal import gate
from .kinds import GUARDED

if TYPE_CHECKING:
    from .run import Run

CLIENTS = 16
"""How many clients there are at a time."""
PATIENCE = 60.0
"""Seconds after which a client gives up."""
CONTENDED = 409


class WebServer(OwnProcess):
    """A uvicorn with the views of ``web_views``.

    Args:
        environment: That of the workers.
    """

    START_TIMEOUT = 60.0

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__("dlock-web-")
        self._environment = environment

    def _launch(self) -> None:
        name = "tests.faults.suite.web_views:application"
        command = [sys.executable, "-m", "uvicorn", name, "--host", HOST, "--port", str(self.port)]
        self._spawn(command, self._environment)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, HTTPException):
            return self.ask("GET", "/ready/", {}) == 200
        return False

    def ask(self, method: str, url: str, headers: Mapping[str, str]) -> int:
        """The status of the answer."""
        with contextlib.closing(HTTPConnection(HOST, self.port, timeout=PATIENCE)) as client:
            client.request(method, url, headers=dict(headers))
            answer = client.getresponse()
            answer.read()
            return answer.status

    def send_only(self, url: str, headers: Mapping[str, str]) -> socket.socket:
        """A client that has sent its request."""
        client = socket.create_connection((HOST, self.port), timeout=PATIENCE)
        lines = [f"POST {url} HTTP/1.1", f"Host: {HOST}", "Content-Length: 0"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        return client


def clients_leave(run: Run) -> None:
    """For each key, a client goes away while its view is at work, comes again, and repeats."""
    server = run.stage.web_server()
    with ThreadPoolExecutor(CLIENTS) as pool:
        visits = [
            pool.submit(_visit, run, server, kind, key) for key in run.keys for kind in run.kinds
        ]
        for visit in visits:
            visit.result()


def _visit(run: Run, server: WebServer, kind: str, key: int) -> None:
    url, facts = f"/{kind}/{key}/", {"kind": kind, "key": key, "delivery": f"{kind} {key}"}
    headers = {"Idempotency-Key": f"{run.name}-{key}", "Journal": str(run.journal.path)}
    run.journal.write("sent", **facts)
    with contextlib.closing(server.send_only(url, headers)):
        _until_hit(run, kind, key)
    # The server has noticed that the first client is gone when it answers the second one.
    status = server.ask("POST", url, headers)
    run.journal.open(gate(kind, key))
    deadline = time.monotonic() + PATIENCE
    while status == CONTENDED and time.monotonic() < deadline:
        status = server.ask("POST", url, headers)
    state = "SUCCESS" if status == 200 else f"HTTP {status}"
    run.journal.write("final", **facts, state=state)


def client_leaves(run: Run, key: int) -> None:
    """The same for one key, while other faults happen: the client repeats until it is done."""
    server, url = run.stage.web_server(), f"/atomic/{key}/"
    headers = {"Idempotency-Key": f"{run.name}-{key}", "Journal": str(run.journal.path)}
    with contextlib.suppress(OSError), contextlib.closing(server.send_only(url, headers)):
        _until_hit(run, GUARDED, key)
    run.journal.open(gate(GUARDED, key))
    deadline, status = time.monotonic() + PATIENCE, 0
    while status != 200 and time.monotonic() < deadline:
        with contextlib.suppress(OSError, HTTPException):
            status = server.ask("POST", url, headers)
        time.sleep(0.1)


def _until_hit(run: Run, kind: str, key: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not any((hit["kind"], hit["key"]) == (kind, key) for hit in run.watch.events("hit")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the view of {kind} {key} did not begin")
        time.sleep(0.02)
