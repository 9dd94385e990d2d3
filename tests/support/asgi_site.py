"""A site under uvicorn, whose views a test holds in the middle.

The view and the test meet at two named pipes: opening one blocks until the other side opens it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import sys
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from testproject.processes import HOST, OwnProcess

NAME = "tests.support.asgi_site"
PATIENCE = 30.0
"""Seconds after which a client gives up."""


class AsgiSite(OwnProcess):
    """The site in a process of its own; each of its views has one effect.

    Args:
        redis_url: Of the locks.
        options: Of uvicorn.
    """

    START_TIMEOUT = 60.0

    def __init__(self, redis_url: str, *options: str) -> None:
        super().__init__("dlock-asgi-")
        self._redis_url, self._options = redis_url, options
        for pipe in ("begun", "goes-on"):
            os.mkfifo(self.directory / pipe)

    def _launch(self) -> None:
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
            "DLOCK_DB": str(self.directory / "db.sqlite3"),
            "DLOCK_SITE": str(self.directory),
            "REDIS_URL": self._redis_url,
        }
        command = [sys.executable, "-m", "uvicorn", f"{NAME}:application", "--host", HOST]
        self._spawn([*command, "--port", str(self.port), *self._options], environment)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, HTTPException):
            return self.ask("GET", "/ready/").status == 200
        return False

    # -- clients -------------------------------------------------------------------------

    def ask(self, method: str, url: str) -> HTTPResponse:
        """The answer, with its body read."""
        with contextlib.closing(HTTPConnection(HOST, self.port, timeout=PATIENCE)) as client:
            client.request(method, url, headers={"Idempotency-Key": "k1"})
            answer = client.getresponse()
            answer.read()
            return answer

    def leave_in_the_middle(self, url: str) -> None:
        """A client that closes its socket while the view is at work."""
        with socket.create_connection((HOST, self.port), timeout=PATIENCE) as client:
            lines = [f"POST {url} HTTP/1.1", "Host: localhost", "Idempotency-Key: k1", "Held: yes"]
            client.sendall("\r\n".join([*lines, "Content-Length: 0", "", ""]).encode())
            (self.directory / "begun").read_text()

    def let_go_on(self) -> None:
        """The view that is held goes on."""
        (self.directory / "goes-on").write_text("")

    def terminate(self) -> None:
        """As a deployment does."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> None:
        """Until the process has ended."""
        assert self._process is not None
        self._process.wait(PATIENCE)

    # -- what has happened ---------------------------------------------------------------

    def written(self) -> list[str]:
        """What the bodies of the views have written."""
        return (self.directory / "views.log").read_text().split()

    def query(self, sql: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self.directory / "db.sqlite3")) as database:
            return database.execute(sql).fetchall()


def _application() -> Any:
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.core.management import call_command

    settings.ROOT_URLCONF = NAME
    settings.MIDDLEWARE = []
    application = get_asgi_application()
    call_command("migrate", verbosity=0)
    return application


def _urls() -> list[Any]:
    from asgiref.sync import sync_to_async
    from django.http import HttpRequest, HttpResponse
    from django.urls import path

    from django_dlock import idempotent_view, locked_view, locks
    from testproject.shop.models import Effect

    here = Path(os.environ["DLOCK_SITE"])

    def note(what: str) -> None:
        with (here / "views.log").open("a") as log:
            log.write(f"{what}\n")

    def body(held: bool) -> None:
        """On a thread, which nobody can cancel."""
        note("begin")
        if held:
            (here / "begun").write_text("")
            (here / "goes-on").read_text()
        Effect.objects.create(order_number=1, by="view")
        note("locked" if locks["default"].list() else "unlocked")

    async def work(request: HttpRequest) -> HttpResponse:
        await sync_to_async(body)("Held" in request.headers)
        return HttpResponse("paid")

    async def ready(request: HttpRequest) -> HttpResponse:
        return HttpResponse("ready")

    def of_shop(request: HttpRequest) -> str:
        return "shop"

    return [
        path("ready/", ready),
        path("locked/", locked_view("pay")(work)),
        path("once/", idempotent_view(client=of_shop)(work)),
        path("cancelled/", locked_view("pay", on_disconnect="cancel")(work)),
    ]


if "DLOCK_SITE" in os.environ:
    application = _application()
    urlpatterns = _urls()
