"""Inspecting a running body does not deadlock its process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, threading
import django
from django.conf import settings

settings.configure(INSTALLED_APPS=["django_dlock"])
django.setup()
from django_dlock.celery.delivery.interrupt import _frame_of

me = threading.get_ident()
for allocations in range(1, 100):
    gc.collect()
    gc.set_threshold(allocations)
    # Removing this garbage takes a lock of the interpreter, which the call below holds. With one
    # of these thresholds, the garbage is collected inside that call.
    local = threading.local()
    local.cycle = [local]
    del local
    assert _frame_of(me) is not None
    gc.set_threshold(0)
assert gc.isenabled()
"""


def test_inspecting_a_body_cannot_deadlock_with_the_garbage_collector() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
