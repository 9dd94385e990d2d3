"""The MAC of a hand-over message, by which a waiter knows that the message grants it a lease.

A message tells a waiter that it holds the lock. Without a MAC, everybody who may read a store and
publish on it could write such a message. A waiter that gets one with a wrong MAC, or without any,
asks the store instead. It may be genuine: from a process with another ``SECRET_KEY``, as while keys
are rotated, or with another version of this package.

The server makes the message, because only the step that ends a lease knows who comes next. So its
caller passes the key on to the script or statement. It is a key for this one name: whoever sees a
command, as in a log of slow statements, can forge hand-overs of that name only.

The MAC is a hash over the key and an inner hash over the key, as in HMAC (RFC 2104, without its
padding), because Redis and PostgreSQL offer a hash to scripts, but no HMAC.
"""

from __future__ import annotations

import functools
import hashlib
import hmac

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.crypto import salted_hmac

from .. import clock
from ..log import logger

_HASHES = {"sha1": hashlib.sha1, "sha256": hashlib.sha256}
_SALT = "django_dlock.handover"
_REPORT_EVERY = 60.0
"""Seconds between two log lines of a process about messages that are not genuine."""

_reported_at = float("-inf")


@functools.lru_cache(maxsize=1024)
def key_of(prefix: str, name: str) -> str:
    """The key for hand-overs of one name, as 40 hexadecimal digits.

    It is empty, and messages have no MAC, in a project without a ``SECRET_KEY``. An acquire that
    may wait asks for it in advance: code that has not run for a while takes fifty times as long,
    and would prolong the hand-over.
    """
    try:
        secret = settings.SECRET_KEY
    except ImproperlyConfigured:
        return ""
    of_prefix = _key_of_prefix(_as_bytes(secret), prefix)
    return hashlib.blake2b(
        name.encode("utf-8", "surrogatepass"), digest_size=20, key=of_prefix
    ).hexdigest()


def _as_bytes(secret: object) -> bytes:
    # As Django does, but a worker that signs nothing may have one that is not UTF-8.
    return secret if isinstance(secret, bytes) else str(secret).encode("utf-8", "surrogatepass")


@functools.lru_cache(maxsize=64)
def _key_of_prefix(secret: bytes, prefix: str) -> bytes:
    value = prefix.encode("utf-8", "surrogatepass")
    return salted_hmac(_SALT, value, secret, algorithm="sha256").digest()


def mac(algorithm: str, key: str, channel: str, grant: str) -> str:
    """The MAC in hexadecimal digits; the scripts and statements of the backends make the same.

    Args:
        grant: The message without its MAC: owner and token.
    """
    # Redis has only SHA-1, whose collisions do not matter here; systems that forbid it for
    # signatures must not refuse it.
    make = _HASHES[algorithm]
    inner = make(f"{key}{channel} {grant}".encode(), usedforsecurity=False).hexdigest()
    return make(f"{key}{inner}".encode(), usedforsecurity=False).hexdigest()


def is_genuine(received: str, algorithm: str, key: str, channel: str, grant: str) -> bool:
    """Whether ``received`` is the MAC of this hand-over."""
    # Another program may have sent anything, and texts beyond ASCII cannot be compared.
    return (
        bool(key)
        and received.isascii()
        and hmac.compare_digest(received, mac(algorithm, key, channel, grant))
    )


def report(key: str, name: str, alias: str) -> None:
    """Log that a waiter had to ask the store; at most once a minute in a process.

    Nothing in a process without a ``SECRET_KEY``, which asks each time.
    """
    global _reported_at
    now = clock.now()
    if not key or now - _reported_at < _REPORT_EVERY:
        return
    _reported_at = now
    logger.warning(
        "A message that hands over lock %r (alias %r) was not made with this process's "
        "SECRET_KEY, so the store was asked. If this goes on, processes have different keys or "
        "versions, or a stranger publishes",
        name,
        alias,
        name=name,
        alias=alias,
    )


def _forget_keys(*, setting: str, **_: object) -> None:
    if setting == "SECRET_KEY":
        key_of.cache_clear()


setting_changed.connect(_forget_keys, dispatch_uid="django_dlock.handover_mac")
