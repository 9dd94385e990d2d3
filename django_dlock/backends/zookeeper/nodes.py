"""Where the nodes of a name are, what is in them, and in which order they stand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast
from urllib.parse import quote, unquote

from ...lease import LeaseRequest
from ...process import ProcessIdentity, current
from ..holder_state import names_of, process_from_json, stored_object
from .session import Session

BUCKETS = 256
"""Directories of nodes, so that a list of nodes is short."""

LONGEST_TTL = 1e9
"""Seconds; another program wrote a longer one."""


@dataclass(frozen=True)
class LockNode:
    """A node of a name.

    Attributes:
        token: When it was created, as a number that rises: its ``czxid``.
        at: The same, in seconds since the epoch on the server's clock.
        changed: When its owner last wrote it, in the same way.
    """

    path: str
    owner: str
    token: int
    at: float
    data: bytes
    # A waiter writes its node again, but it remains the same one.
    changed: float = field(default=0.0, compare=False)


class Facts(NamedTuple):
    """What a node says of its holder.

    Attributes:
        name: Of the lock; empty if it is missing.
        metadata: JSON, or what else is there.
        ttl: Seconds for which its lease was to be granted.
        session: Seconds for which the servers keep its silent session; 0 if not known.
        damaged: As of ``LeaseInfo``, except ``metadata``.
    """

    process: ProcessIdentity | None
    metadata: object
    ttl: float
    damaged: tuple[str, ...] = ()
    name: str = ""
    session: float = 0.0

    def name_of(self, digest: str) -> str:
        """The name, if its digest is this one."""
        return self.name if self.name and _digest(self.name) == digest else ""


def content(request: LeaseRequest, ttl: float, session: float) -> bytes:
    """The data of a node."""
    facts = {
        "name": request.name,
        "process": current().as_dict(),
        "metadata": request.metadata,
        "ttl": ttl,
        "session": session,
    }
    return json.dumps(facts, separators=(",", ":")).encode()


def contents(node: LockNode) -> Facts:
    """What ``content`` has put there; empty values if another program has written it."""
    facts, whole = stored_object(node.data.decode(errors="replace"))
    process = process_from_json(json.dumps(facts.get("process")))
    ttl, name = facts.get("ttl"), facts.get("name")
    is_duration = _is_duration(ttl)
    session = facts.get("session")
    return Facts(
        process,
        facts.get("metadata") if whole else "{}",
        float(cast(float, ttl)) if is_duration else 0.0,
        names_of(node=not whole, process=whole and process is None, ttl=whole and not is_duration),
        name if isinstance(name, str) else "",
        float(cast(float, session)) if _is_duration(session) else 0.0,
    )


def _is_duration(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < cast(float, value) < LONGEST_TTL


def path_of(root: str, name: str, owner: str) -> str:
    """The path of the node; it names the owner, so a deletion can end no other's lease."""
    digest = _digest(name)
    # ZooKeeper takes no "/" in the name of a node.
    return f"{_directory(root, digest)}/{digest}-{quote(owner, safe='')}"


def node_of(path: str) -> str:
    """The last part of a path."""
    return path.rpartition("/")[2]


def digest_of(path: str) -> str:
    """What stands for the name in a path."""
    return node_of(path).partition("-")[0]


def lock_node(path: str, data: bytes, state: Any) -> LockNode:
    """A node as it was read."""
    owner = unquote(node_of(path).partition("-")[2])
    return LockNode(path, owner, state.czxid, state.created, data, state.last_modified)


def queue(session: Session, name: str, deadline: float) -> tuple[float, list[LockNode]]:
    """The server's time, and all nodes of the name in order, as a majority knows them."""
    beat = session.beat()
    listed = session.client.get_children_async(_directory(session.root, _digest(name)))
    now: float = session.answer(beat, deadline).last_modified
    nodes = session.answer_or_none(listed, deadline) or []
    return now, other_nodes(session, name, nodes, deadline)


def other_nodes(
    session: Session, name: str, nodes: Sequence[str], deadline: float, *, but: str = ""
) -> list[LockNode]:
    """The nodes of the name in the order of their creation, without that of one owner."""
    digest, found = _digest(name), []
    directory = _directory(session.root, digest)
    # Not for its own node: if there is no other one, no request is needed.
    paths = [
        f"{directory}/{node}"
        for node in nodes
        if node.startswith(f"{digest}-") and unquote(node.partition("-")[2]) != but
    ]
    asked = [(path, session.client.get_async(path)) for path in paths]
    for path, request in asked:
        answer = session.answer_or_none(request, deadline)
        if answer is not None:
            found.append(lock_node(path, *answer))
    return sorted(found, key=lambda node: node.token)


def still_there(session: Session, nodes: Sequence[LockNode], deadline: float) -> list[LockNode]:
    """Those nodes that have not been deleted, even if a later one has the same path.

    A process that has lost its session joins the queue again with the same path, but at the end.
    """
    asked = [(node, session.client.exists_async(node.path)) for node in nodes]
    states = [(node, session.answer(request, deadline)) for node, request in asked]
    return [node for node, state in states if state is not None and state.czxid == node.token]


def _directory(root: str, digest: str) -> str:
    return f"{root}/{int(digest[:8], 16) % BUCKETS:02x}"


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
