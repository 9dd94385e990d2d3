"""Looking at a running body does not deadlock its process."""

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
    # Garbage whose removal takes a lock of the interpreter's, which the call below holds. With
    # one of these thresholds it is collected inside of that call.
    local = threading.local()
    local.cycle = [local]
    del local
    assert _frame_of(me) is not None
    gc.set_threshold(0)
assert gc.isenabled()
"""


def test_asking_where_a_body_is_cannot_deadlock_with_the_garbage_collector() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
