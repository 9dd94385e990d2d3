"""What uWSGI must be told so that leases are renewed and forks are seen.

System checks run in ``manage.py``, which uWSGI does not run. So what is found is logged when uWSGI
loads the project, and ``check`` reports it where it does run in uWSGI.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from django.core import checks

from ..log import logger


def check_uwsgi(**_: Any) -> list[checks.CheckMessage]:
    """W024: uWSGI runs no threads of Python; W025: it forks after a project is loaded."""
    # uWSGI makes this module itself, in its own processes only.
    options = getattr(sys.modules.get("uwsgi"), "opt", None)
    return [] if options is None else list(_problems(options))


def log_problems() -> None:
    """Log what ``check_uwsgi`` finds; called when the apps are ready."""
    for found in check_uwsgi():
        logger.warning("%s %s (%s)", found.msg, found.hint, found.id)


def _problems(options: Mapping[bytes, Any]) -> list[checks.CheckMessage]:
    # Bytes in Python 3; a value is True, a text, or a list of these.
    given = {
        (name.decode() if isinstance(name, bytes) else name): options[name] for name in options
    }
    found: list[checks.CheckMessage] = []
    if not {"enable-threads", "threads"} & set(given):
        found.append(
            checks.Warning(
                "uWSGI runs no threads of Python, so no lease is renewed: a lock is lost when its "
                "TTL ends.",
                hint="Set enable-threads = true.",
                id="django_dlock.W024",
            )
        )
    forks = "master" in given or _number(given) > 1
    if forks and not {"lazy-apps", "lazy", "py-call-osafterfork"} & set(given):
        found.append(
            checks.Warning(
                "uWSGI forks its workers after it has loaded the project, without telling Python. "
                "Locks that were taken by then are lost in the workers, and a SQLite file of "
                "leases that was open is refused. A worker that is forked while a thread of Python "
                "runs, such as that which renews leases, may wait for it for ever.",
                hint="Set lazy-apps = true.",
                id="django_dlock.W025",
            )
        )
    return found


def _number(given: Mapping[str, Any]) -> int:
    """The number of workers; a list if it was given more than once."""
    value = given.get("processes", given.get("workers", b"1"))
    value = value[-1] if isinstance(value, list) else value
    try:
        return int(value)
    except (TypeError, ValueError):
        return 1
