"""A site that serves its metrics to several clients at once, in processes of its own.

Run by ``python -m tests.support.metrics_site PORT``; ``SITE_SETTINGS`` has its settings as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from testproject.processes import HOST, free_port

ROOT = Path(__file__).resolve().parents[2]
LOCAL = {"default": {"BACKEND": "django_dlock.backends.local.LocalBackend", "TTL": 3.0}}


def read(port: int, path: str = "metrics", timeout: float = 30.0) -> str:
    """The answer of the site.

    Raises:
        OSError: There was none in time.
    """
    with urllib.request.urlopen(f"http://{HOST}:{port}/{path}", timeout=timeout) as answer:
        text: str = answer.read().decode()
    return text


def series(page: str) -> dict[str, float]:
    """The values of a page, without comments."""
    lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@contextlib.contextmanager
def site(
    directory: Path, settings: Mapping[str, Any], *, env: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Yields the port."""
    port = free_port()
    command = [sys.executable, "-m", "tests.support.metrics_site", str(port)]
    given = {**os.environ, "SITE_SETTINGS": json.dumps(settings), **(env or {})}
    with (directory / f"site-{port}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        # It says that it listens.
        assert process.stdout.readline(), Path(log.name).read_text()
        yield port
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    import django
    from django.conf import settings
    from django.core.management import call_command

    settings.configure(
        INSTALLED_APPS=["django_dlock"],
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF="tests.support.metrics_site_urls",
        USE_TZ=True,
        **json.loads(os.environ["SITE_SETTINGS"]),
    )
    django.setup()

    if "SITE_MIGRATE" in os.environ:
        call_command("migrate", verbosity=0)

    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIServer, make_server

    from django.core.wsgi import get_wsgi_application

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True

    server = make_server(HOST, int(sys.argv[1]), get_wsgi_application(), Server)
    print("listening", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
