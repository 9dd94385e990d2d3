"""A site whose views are killed in the middle: each request has a process of its own.

Run as ``python -m tests.support.dying_site FILE``; it prints its port. While a file named
``FILE.dies`` exists, the views kill their process.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from socketserver import ForkingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import django
from django.conf import settings
from django.core.management import call_command
from django.core.wsgi import get_wsgi_application
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.urls import path

FILE = sys.argv[1]
DIES = Path(f"{FILE}.dies")

settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": FILE}},
    INSTALLED_APPS=["django_dlock"],
    ROOT_URLCONF="__main__",
    SECRET_KEY="of a test",
)
django.setup()

from django_dlock import idempotent_view  # noqa: E402
from django_dlock.models import IdempotencyRecord  # noqa: E402


class ForkingServer(ForkingMixIn, WSGIServer):
    pass


class Quiet(WSGIRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def work() -> HttpResponse:
    if DIES.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return HttpResponse("done", status=201)


@idempotent_view(client=lambda request: "client", idempotency_scope="pay")
def pay(request: HttpRequest) -> HttpResponse:
    return work()


@idempotent_view(client=lambda request: "client", idempotency_scope="apay")
async def apay(request: HttpRequest) -> HttpResponse:
    return work()


def forget(request: HttpRequest, scope: str) -> HttpResponse:
    key = IdempotencyRecord.objects.get(scope=scope).key
    return HttpResponse(f"{IdempotencyRecord.objects.forget(scope, key)}")


urlpatterns = [path("pay", pay), path("apay", apay), path("forget/<scope>", forget)]


def main() -> None:
    call_command("migrate", verbosity=0)
    connections.close_all()
    # So that children that were killed are not left as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with ForkingServer(("127.0.0.1", 0), Quiet) as server:
        server.set_app(get_wsgi_application())
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
