"""Serves the views of a test on a socket, with a thread for each client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler


class _Watched:
    """What a client sends; tells when it is read."""

    def __init__(self, stream: Any, reading: threading.Event) -> None:
        self.stream, self.reading = stream, reading

    def read(self, size: int = -1) -> bytes:
        self.reading.set()
        content: bytes = self.stream.read(size)
        return content

    def readline(self, size: int = -1) -> bytes:
        line: bytes = self.stream.readline(size)
        return line


class _Quiet(WSGIRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(reading: threading.Event | None = None) -> Iterator[tuple[str, int]]:
    """Yields the address.

    Args:
        reading: Is set when the body of a request is read.
    """
    django, told = WSGIHandler(), reading or threading.Event()

    def application(environ: Any, start_response: Any) -> Any:
        watched = _Watched(environ["wsgi.input"], told)
        return django({**environ, "wsgi.input": watched}, start_response)

    server = ThreadedWSGIServer(("127.0.0.1", 0), _Quiet, connections_override={})
    server.daemon_threads = False
    server.set_app(application)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address  # type: ignore[misc]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
