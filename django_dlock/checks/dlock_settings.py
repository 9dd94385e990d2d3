"""System checks of the settings other than ``DLOCKS``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from .. import tenancy
from ..metrics import config
from ..operators import task_url
from ..tracing import setting as tracing_setting

LIKE_OURS = re.compile("DLOCK$|DLOCKS?_")
NAMES = ("DLOCK_ADMIN", "DLOCK_METRICS", "DLOCK_SCOPE", "DLOCK_TRACING")


def check_names(**_: Any) -> list[checks.CheckMessage]:
    """W026: a setting that looks like one of ours, and is none."""
    found: list[checks.CheckMessage] = []
    known = ["DLOCKS", *NAMES]
    for name in sorted(dir(settings)):
        if LIKE_OURS.match(name) and name not in NAMES:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            found.append(
                checks.Warning(
                    f"{name} is no setting of django_dlock, and has no effect; the one with the "
                    f"nearest name is {nearest}.",
                    hint=f"Known: {', '.join(known)}. If {name} is a setting of your own, give it "
                    "another name, or silence this check.",
                    id="django_dlock.W026",
                )
            )
    return found


def check_admin(**_: Any) -> list[checks.CheckMessage]:
    """Errors in ``DLOCK_ADMIN``, E013."""
    return _errors_of(task_url.read, "DLOCK_ADMIN", "E013", "the admin has no links to tasks")


def check_metrics(**_: Any) -> list[checks.CheckMessage]:
    """Errors in ``DLOCK_METRICS``, E014."""
    return _errors_of(_read_metrics, "DLOCK_METRICS", "E014", "nothing is counted")


def check_tracing(**_: Any) -> list[checks.CheckMessage]:
    """Errors in ``DLOCK_TRACING``, E015."""
    return _errors_of(tracing_setting.tracer_class, "DLOCK_TRACING", "E015", "nothing is traced")


def check_scope(**_: Any) -> list[checks.CheckMessage]:
    """Errors in ``DLOCK_SCOPE``, E016."""
    return _errors_of(tenancy.read, "DLOCK_SCOPE", "E016", "every lock and record raises this")


def _read_metrics() -> None:
    if (wanted := config.read()).exporters:
        # Imported here, because a project without metrics does not need it.
        from ..metrics import recorder

        recorder.modules(wanted)


def _errors_of(
    read: Callable[[], object], name: str, number: str, until_then: str
) -> list[checks.CheckMessage]:
    try:
        read()
    except ImproperlyConfigured as error:
        hint = f"Correct {name} in the settings; until then, {until_then}."
        return [checks.Error(str(error), hint=hint, id=f"django_dlock.{number}")]
    return []
