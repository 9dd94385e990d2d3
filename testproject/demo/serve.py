"""The site, its workers and a trickle of work, until Ctrl-C."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import sys
import time

from testproject.servers import free_port

from .report import LOCKED, RECORD
from .stage import Stage

__all__ = ["serve"]

PORT = 8000
USER = "admin"
PACE = 1.0
"""Seconds between two orders."""
HELD_FOR = 25.0
"""Seconds that every fifth order takes, so that there is a lock to see."""


def serve() -> int:
    """Print where the admin is, and go on until Ctrl-C; the exit code."""
    with contextlib.suppress(KeyboardInterrupt), Stage() as stage:
        password = _create_user()
        port = _port()
        # The site's own settings: the demonstration's differ for the sake of slow bodies.
        site = ("-m", "django", "runserver", "--settings", "testproject.settings")
        stage.start(*site, "--noreload", "--insecure", f"127.0.0.1:{port}", name="site")
        stage.start_worker([LOCKED, RECORD], "worker", children=8)
        _wait_for(stage, port)
        print(f"Admin      http://127.0.0.1:{port}/admin/")
        print(f"Login      {USER}")
        print(f"Password   {password}")
        print(f"Redis      {stage.redis.url}")
        print("Orders trickle in; some are held for a while, see Held locks. Ctrl-C ends it all.")
        sys.stdout.flush()
        _trickle(stage)
        print(f"A process ended by itself.\n{stage.logs()}", file=sys.stderr)
        return 1
    print("\nStopped.")
    return 0


def _trickle(stage: Stage) -> None:
    """Publish orders for as long as all processes run; each twice, as happens."""
    from .tasks import TASKS

    for number in itertools.count(1):
        column = (LOCKED, RECORD)[number % 2]
        work = HELD_FOR if number % 5 == 1 else 0.2
        for _ in range(2):
            TASKS[column].apply_async((number, work, 0.0), queue=column)
        if stage.dead():
            return
        time.sleep(PACE)


def _create_user() -> str:
    from django.contrib.auth import get_user_model

    password = secrets.token_urlsafe(9)
    get_user_model()._default_manager.create_superuser(username=USER, password=password)
    return password


def _port() -> int:
    """The usual port, or another where it is taken."""
    with socket.socket() as probe:
        # As the site does; otherwise a port is taken for a minute after the last visitor.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return free_port()
    return PORT


def _wait_for(stage: Stage, port: int) -> None:
    while not stage.dead():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
