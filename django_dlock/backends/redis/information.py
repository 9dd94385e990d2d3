"""What a Redis reports about itself, from its answers to ``INFO``."""

from __future__ import annotations

from collections.abc import Mapping

from ..base import Fact, Problem

SHARE = 0.9
"""The fraction of a limit beyond which the limit counts as nearly reached."""
RESTART = "Set appendonly yes, so that a restart does not free locks whose holders are running."


def parsed(information: str) -> dict[str, str]:
    """The lines of an answer to ``INFO``."""
    return dict(line.split(":", 1) for line in information.splitlines() if ":" in line)


def online_replicas(values: Mapping[str, str]) -> int:
    # A line is such as "slave0:ip=10.0.0.2,port=6379,state=online,offset=14,lag=0".
    return sum(key.startswith("slave") and "state=online" in value for key, value in values.items())


def no_confirmation(alias: str) -> Problem:
    """W011, if the server refuses ``WAIT``."""
    message = (
        f"Each lock of alias {alias!r} has to be confirmed by replicas of its Redis, which refuses "
        "WAIT: no lock can be acquired."
    )
    hint = f"Allow WAIT, or remove DLOCKS[{alias!r}]['OPTIONS']['replicas']."
    return Problem("W011", message, hint)


def facts_of(values: Mapping[str, str], snapshots: bool | None, pool: int) -> list[Fact]:
    """Facts about the server.

    Args:
        values: All its lines.
        snapshots: Whether it saves snapshots; ``None`` if it does not tell.
        pool: The most connections that this process makes.
    """
    if not values:
        return []
    return [
        _server(values),
        _replication(values),
        _eviction(values),
        _persistence(values, snapshots),
        _memory(values),
        _connections(values, pool),
    ]


def _server(values: Mapping[str, str]) -> Fact:
    valkey = values.get("valkey_version")
    product = f"Valkey {valkey}" if valkey else f"Redis {values.get('redis_version', '?')}"
    # Valkey has renamed it.
    mode = values.get("server_mode") or values.get("redis_mode", "standalone")
    return Fact("server", f"{product}, {mode}")


def _replication(values: Mapping[str, str]) -> Fact:
    if values.get("role") == "slave":
        hint = "Name the primary in LOCATION; a replica grants no lock."
        return Fact("replicas", "the server is a replica", hint)
    connected, online = values.get("connected_slaves", "0"), online_replicas(values)
    return Fact("replicas", f"{online} online of {connected}" if connected != "0" else "none")


def _eviction(values: Mapping[str, str]) -> Fact:
    policy = values.get("maxmemory_policy", "noeviction")
    limited = values.get("maxmemory", "0") != "0"
    # If it evicts keys, store_problems() says what to do.
    return Fact("eviction", policy if limited else f"{policy}, without a limit of memory")


def _persistence(values: Mapping[str, str], snapshots: bool | None) -> Fact:
    if values.get("rdb_last_bgsave_status", "ok") != "ok":
        hint = "See the server's log; unless stop-writes-on-bgsave-error is no, it refuses writes."
        return Fact("persistence", "the last snapshot failed", hint)
    if values.get("aof_enabled") == "1":
        if values.get("aof_last_write_status", "ok") != "ok":
            hint = "See the server's log; it refuses writes until it can write the file."
            return Fact("persistence", "the append-only file cannot be written", hint)
        return Fact("persistence", "append-only file")
    if snapshots is None:
        return Fact("persistence", "no append-only file", RESTART)
    return Fact("persistence", "snapshots only" if snapshots else "none", RESTART)


def _memory(values: Mapping[str, str]) -> Fact:
    used, limit = _number(values, "used_memory"), _number(values, "maxmemory")
    text = f"{_mebibytes(used)} in use"
    if not limit:
        return Fact("memory", text)
    text = f"{text} of {_mebibytes(limit)}"
    if used < SHARE * limit or values.get("maxmemory_policy", "noeviction") != "noeviction":
        return Fact("memory", text)
    return Fact("memory", text, "Raise maxmemory; a full server grants no lock.")


def _connections(values: Mapping[str, str], pool: int) -> Fact:
    connected, limit = _number(values, "connected_clients"), _number(values, "maxclients")
    text = f"{connected} at the server"
    if limit:
        text += f", which takes {limit}"
    text += f"; at most {pool} of each process"
    if limit and connected + pool > SHARE * limit:
        hint = "Raise maxclients there, or lower OPTIONS['max_connections']."
        return Fact("connections", text, hint)
    return Fact("connections", text)


def _number(values: Mapping[str, str], key: str) -> int:
    text = values.get(key, "")
    return int(text) if text.isdecimal() else 0


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
