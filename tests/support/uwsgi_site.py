"""A site that uWSGI runs; a lock is held when the project is loaded.

Its environment gives ``REDIS_URL``, and ``RELEASE``, a file that ends the request that holds.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import django
from django.conf import settings

from tests.support.aliases import LONG, alias

logging.basicConfig()
settings.configure(
    DLOCKS={"default": alias(os.environ["REDIS_URL"], OPTIONS={"command_timeout": 0.6})},
    INSTALLED_APPS=["django_dlock"],
    SECRET_KEY="tests" * 10,
)
django.setup()

from django_dlock import Lock  # noqa: E402

loaded = Lock("loaded", ttl=LONG, bound=False)
loaded.acquire(timeout=5)
# uWSGI forks without asking whether a thread of Python runs. A worker would wait for ever for one
# that does, so let the thread that renews come to rest.
time.sleep(2)


def hold() -> Any:
    """Hold ``it`` until the file is there, for longer than its lease lasts without renewals."""
    lock = Lock("it")
    if not lock.acquire(blocking=False):
        return ["contended", loaded.lost_reason]
    while not Path(os.environ["RELEASE"]).exists():
        time.sleep(0.05)
    state = lock.state
    lock.release()
    return [state, loaded.lost_reason]


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    try:
        answer = hold()
    except Exception as error:
        answer = repr(error)
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]
