"""What another program says of a holder."""

from __future__ import annotations

import gc
import weakref

from django_dlock.backends.holder_state import process_from_json


class Text(str):
    """A text to which there can be weak references."""


def test_an_identity_of_any_length_is_not_kept_in_memory():
    long = Text('{"pid": 1, "host": "%s"}' % ("h" * 10_000))
    kept = weakref.ref(long)
    assert process_from_json(long) is None
    del long
    gc.collect()
    assert kept() is None
