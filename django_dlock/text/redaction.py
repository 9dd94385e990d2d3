"""Settings as text for messages and for ``repr``, without the credentials that they contain."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "********"
"""Shown in the place of a secret; as in Django's error reports, it does not tell how long it is."""

LARGE = 10**18

_WORDS = (
    r"pass|pwd|(?<![a-z])pw(?![a-z])|secret|token|credential|auth|sasl|digest|signature|api_?key"
    r"|private"
)
_NAME = re.compile(_WORDS, re.IGNORECASE)
"""A part of the names of settings that are secret: ``password``, ``auth_data``."""
_PARAMETER = re.compile(
    rf"""([\w-]*(?:{_WORDS})[\w-]*(?:["']?\s*=|["']\s*:|:(?=\s))\s*)"""
    # In quotes, it may contain anything.
    r"""(?:(["'])(?:\\.|(?!\2).)+|[^&;,\s"']+)""",
    re.IGNORECASE | re.DOTALL,
)
"""A parameter of a URL, of a server as in ``host:6380,password=…``, or in JSON."""
_USER_INFO = re.compile(r"^(.*?://)?.*@", re.DOTALL)
"""All up to the last ``@``: a password that is not encoded may contain an ``@`` or a ``/`` itself,
and so may one of several URLs."""
_NO_PORT = re.compile(r"^(.*?://[^/:@\[]*:)(?!\d{0,5}(?:[/?#,;]|$)).*", re.DOTALL)
"""What is in the place of a port, if it is no number: the rest of a URL is missing."""


def redacted(value: object) -> str:
    """The ``repr`` of a setting, with ``********`` for each credential.

    Credentials are the values of keys such as ``password``, and the user and password of an
    address, also in a list, in ``bytes``, or where a whole entry was meant.
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{redacted(k)}: {redacted_of(k, v)}' for k, v in value.items())}}}"
    if isinstance(value, list | tuple | set | frozenset):
        return _collection(value)
    if isinstance(value, bytes | bytearray):
        # Each byte is one character, so that the rest stays as it is.
        return repr(_without_credentials(bytes(value).decode("latin-1")).encode("latin-1"))
    if isinstance(value, str):
        return repr(_without_credentials(str(value)))
    if isinstance(value, int) and abs(value) > LARGE:
        # Python refuses to write integers of thousands of digits.
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return _without_credentials(_repr(value))


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - of a class of the project
        return f"{type(value).__name__}() without a repr"


def redacted_of(key: object, value: object) -> str:
    """As ``redacted``, for the value of this key, which may say that it is a credential."""
    # Whether there is one is no secret.
    is_secret = _NAME.search(str(key)) and value not in (None, "")
    return repr(HIDDEN) if is_secret else redacted(value)


def _collection(value: list[object] | tuple[object, ...] | set[object] | frozenset[object]) -> str:
    text = ", ".join(map(redacted, value))
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str):
        # A pair may be meant for a dict.
        text = f"{redacted(value[0])}, {redacted_of(*value)}"
    if isinstance(value, list):
        return f"[{text}]"
    if isinstance(value, tuple):
        return f"({text},)" if len(value) == 1 else f"({text})"
    return f"{{{text}}}" if value else repr(value)


def _without_credentials(text: str) -> str:
    text = _USER_INFO.sub(lambda found: f"{found[1] or ''}{HIDDEN}@", text)
    text = _NO_PORT.sub(lambda found: f"{found[1]}{HIDDEN}", text)
    return _PARAMETER.sub(lambda found: f"{found[1]}{found[2] or ''}{HIDDEN}", text)


class SecretText(str):
    """A secret for a client, which its errors, its log and error pages show as ``********``."""

    def __repr__(self) -> str:
        return repr(HIDDEN)


class SecretBytes(bytes):
    """As ``SecretText``, for a request that contains a secret."""

    def __repr__(self) -> str:
        return repr(HIDDEN)
