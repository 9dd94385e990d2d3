"""What the backend keeps in etcd: one key per held name; and how transactions are written.

The value of a key has three lines: the owner and some facts, the holder's process, and the
metadata. The owner comes first, so that a transaction can compare it: a value has the owner
``abc`` if it is greater than ``"abc "`` and less than ``"abc!"``, the next character after a
space.

In etcd's JSON, keys and values are Base64, and 64-bit numbers are strings.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast
from urllib.parse import quote

from ...lease import Kind
from ...lease_info import KINDS
from ...process import ProcessIdentity
from ..holder_state import json_object, names_of, process_from_json

Json: TypeAlias = dict[str, Any]

FORMAT = "1"
"""Part of every key, so that incompatible versions never read each other's values."""


def prefix_of(key_prefix: str) -> str:
    """What all keys of an alias begin with."""
    # Quoted, so that a prefix that contains a slash meets no key of another prefix.
    return f"{quote(key_prefix, safe=':')}/{FORMAT}/"


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def range_after(prefix: str) -> str:
    """The end of the range of all keys with the prefix, in Base64."""
    text = prefix.encode()
    # A last byte of UTF-8 is never 255, so there is a next one.
    return base64.b64encode(text[:-1] + bytes([text[-1] + 1])).decode()


def after(key: str) -> str:
    """The first possible key after this one; both in Base64."""
    return base64.b64encode(base64.b64decode(key) + b"\0").decode()


NUMBERS = ("at", "ttl", "renewals", "renewed")
LARGEST = 10**10
"""Seconds since 1970, and all other numbers, are smaller."""


class Entry(NamedTuple):
    """A key as it was read.

    Attributes:
        token: The revision of the store that created the key.
        revision: The revision that wrote it last.
        lease: The id of etcd's lease that it is attached to; 0 for none.
        facts: See ``value_of``; empty if another program has written the value.
    """

    owner: str
    token: int
    revision: int
    lease: int
    facts: Mapping[str, Any]
    process_json: str
    metadata: str

    @classmethod
    def parse(cls, pair: Mapping[str, Any]) -> Entry:
        value = base64.b64decode(pair.get("value", "")).decode(errors="replace")
        head, *rest = value.split("\n")
        owner, _, facts = head.partition(" ")
        process, metadata = rest if len(rest) == 2 else ("", "{}")
        return cls(
            owner,
            int(pair["create_revision"]),
            int(pair["mod_revision"]),
            int(pair.get("lease", 0)),
            json_object(facts),
            process,
            metadata,
        )

    @property
    def process(self) -> ProcessIdentity | None:
        return process_from_json(self.process_json)

    @property
    def kind(self) -> Kind:
        kind = self.facts.get("kind")
        return kind if kind in KINDS else "held"

    @property
    def context(self) -> tuple[str, str]:
        """The second and third line of the value, as they are."""
        return self.process_json, self.metadata

    def number(self, fact: str) -> int:
        """A fact that is a number; 0 if it is missing or damaged."""
        found = self.facts.get(fact, 0)
        return found if _is_number(found) else 0

    @property
    def damaged(self) -> tuple[str, ...]:
        """As of ``LeaseInfo``, except ``metadata``."""
        return names_of(
            facts=not self.facts or not all(_is_number(self.facts.get(one, 0)) for one in NUMBERS),
            kind=bool(self.facts) and self.facts.get("kind") not in KINDS,
            process=self.process is None,
        )


def _is_number(value: object) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and 0 <= cast(int, value) < LARGEST


def value_of(owner: str, facts: Mapping[str, Any], process: str, metadata: str) -> str:
    """The value of a key, in Base64.

    Args:
        facts: ``kind``, ``at`` (of the grant, in seconds since the epoch), ``ttl`` of etcd's lease
            in seconds, ``renewals``, ``renewed`` (when for the last time, as ``at``), ``shortened``
            (the highest ``Renewal.shorten`` so far), and ``shared`` (whether other keys may be
            attached to the same lease of etcd).
        process, metadata: JSON objects.
    """
    return encoded(f"{owner} {json.dumps(facts)}\n{process}\n{metadata}")


# -- operations and comparisons of a transaction ---------------------------------------------


def read(key: str) -> Json:
    return {"request_range": {"key": key}}


def read_all(prefix: str) -> Json:
    """Count all keys of an alias."""
    area = {"key": encoded(prefix), "range_end": range_after(prefix), "count_only": True}
    return {"request_range": area}


def put(key: str, value: str, lease: int) -> Json:
    return {"request_put": {"key": key, "value": value, "lease": str(lease)}}


def put_if_free(key: str, value: str, lease: int) -> Json:
    """Create the key unless it exists; then read it."""
    free = {"key": key, "target": "CREATE", "create_revision": "0"}
    return {"compare": [free], "success": [put(key, value, lease)], "failure": [read(key)]}


def put_if_unchanged(key: str, value: str, lease: int, revision: int) -> Json:
    """Write the key unless anybody has written or deleted it since it was read."""
    unchanged = {"key": key, "target": "MOD", "mod_revision": str(revision)}
    return {"compare": [unchanged], "success": [put(key, value, lease)]}


def delete_if_owned(key: str, owner: str) -> Json:
    """Delete the key if it has this owner; answers with what was deleted."""
    return {
        "compare": _owned(key, owner),
        "success": [{"request_delete_range": {"key": key, "prev_kv": True}}],
    }


def _owned(key: str, owner: str) -> Sequence[Json]:
    return [
        {"key": key, "target": "VALUE", "result": "GREATER", "value": encoded(owner + " ")},
        {"key": key, "target": "VALUE", "result": "LESS", "value": encoded(owner + "!")},
    ]


# -- answers ---------------------------------------------------------------------------------


def now_of(answer: Json) -> float:
    """The time of the member that has answered, or ours if a proxy has removed it."""
    return float(answer["date"]) or time.time()


def entries_of(answer: Json) -> list[Entry | None]:
    """What each read of a transaction has found."""
    found: list[Entry | None] = []
    for response in answer.get("responses", ()):
        pairs = response["response_range"].get("kvs")
        found.append(Entry.parse(pairs[0]) if pairs else None)
    return found


def deleted_of(answer: Json) -> Entry | None:
    """What ``delete_if_owned`` has deleted."""
    if not answer.get("succeeded"):
        return None
    (response,) = answer["responses"]
    return Entry.parse(response["response_delete_range"]["prev_kvs"][0])
