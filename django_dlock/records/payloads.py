"""What a record stores of its payload: a fingerprint that is keyed with ``SECRET_KEY``.

A fingerprint without a key tells a payload that has few possible values, such as a code of four
digits: whoever reads it makes the fingerprint of each, and compares. With a key, only who knows the
key can do so. Scope and key of the record are part of it, so that nobody can compare it with the
one that a record of their own has.
"""

from __future__ import annotations

import base64
import json

from django.conf import settings
from django.utils.crypto import salted_hmac

_VERSION = "k1:"
# A part of what is stored: it stays when the module is moved.
_SALT = "django_dlock.payloads"


def keyed(scope: str, key: str, payload: str) -> str:
    """What is stored of the fingerprint ``payload``; at most 64 characters.

    An empty one, with which nothing is compared, stays empty.
    """
    return _keyed(scope, key, payload, settings.SECRET_KEY) if payload else ""


def is_same(stored: str, scope: str, key: str, payload: str) -> bool:
    """Whether ``stored`` was made from the fingerprint ``payload``.

    It may have been made with ``SECRET_KEY``, with one of ``SECRET_KEY_FALLBACKS``, or without a
    key, by an earlier version.
    """
    if not stored.startswith(_VERSION):
        return stored == payload
    secrets = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return any(stored == _keyed(scope, key, payload, secret) for secret in secrets)


def _keyed(scope: str, key: str, payload: str, secret: str | bytes) -> str:
    # As JSON, so that ("a", "bc") differs from ("ab", "c").
    text = json.dumps([scope, key, payload])
    made = salted_hmac(_SALT, text, secret, algorithm="sha256").digest()
    return _VERSION + base64.urlsafe_b64encode(made).decode().rstrip("=")
