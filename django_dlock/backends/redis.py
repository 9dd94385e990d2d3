"""Leases on one Redis server, reached directly, through TLS, a Unix socket or Sentinels."""

from __future__ import annotations

import datetime as dt
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from redis import exceptions as errors

from .. import clock
from ..exceptions import BackendUnavailable
from ..lease import Contention, Fate, Kind, Lease, LeaseInfo, LeaseRequest, Renewal
from ..process import ProcessIdentity, current, death_proof
from . import redis_scripts as scripts
from .base import AliasOptions, BaseLockBackend, Fates, LeaseInfos, PendingRenewal
from .describe import holder_state, json_object, process_from_json
from .redis_connections import CUT, FAILURES, RedisConnections
from .redis_parameters import connection_maker
from .redis_renewal import SentRenewal, fates_of, text
from .redis_scripts import Script

__all__ = ["RedisBackend"]

RENEWALS_PER_CALL = 500
BYTES_SENT_AT_ONCE = 16_000
"""So much fits into the buffer of a connected socket, so that sending it cannot block."""
LONGEST_BLOCK = 10.0
"""Seconds after which a waiter asks again although nothing woke it."""
SHORTEST_BLOCK = 0.05
ASK_EVERY = 0.5
UNDONE_FOR = 120.0
"""Seconds, besides the TTL, for which an undone attempt cannot be granted any more."""
ROWS_PER_CALL = 200


# Named here because inside the class ``list`` is a method.
Strings = list[str]
Arguments = list[str | int]


def _ms(seconds: float) -> int:
    # Up, and one more for the server's own rounding: the backend's end is never the earlier.
    return math.ceil(seconds * 1000) + 1


@functools.lru_cache(maxsize=1)
def _process_json(process: ProcessIdentity) -> str:
    return json.dumps(process.as_dict(), separators=(",", ":"))


class RedisBackend(BaseLockBackend):
    """Every operation is one script, so one step for the server and one round trip for us."""

    supports_wakeup = True
    supports_listing = True

    def __init__(self, options: AliasOptions) -> None:
        super().__init__(options)
        # A little less, so that a socket's own timeout keeps the deadline of most calls.
        timeout = 0.95 * self.command_timeout
        self._connections = RedisConnections(connection_maker(options, timeout), timeout)
        bucket = f"{{{options.key_prefix}:0}}"
        self._locks, self._waiters = f"{bucket}:l:", f"{bucket}:q:"
        self._wakes, self._undone = f"{bucket}:w:", f"{bucket}:u:"
        self._index, self._beats, self._clock = (
            f"{bucket}:{key}" for key in ("index", "beats", "clock")
        )

    # -- leases ------------------------------------------------------------------------

    def acquire(self, request: LeaseRequest, *, deadline: float) -> Lease | Contention:
        name, owner, process = request.name, request.owner, current()
        answer, sent_at = self._run(
            scripts.ACQUIRE,
            [
                self._locks + name,
                self._waiters + name,
                self._index,
                self._clock,
                self._undone + owner,
            ],
            [
                name,
                owner,
                _ms(request.ttl),
                request.kind,
                process.id,
                _process_json(process),
                request.metadata,
                "1" if request.waits else "0",
                request.replaces,
            ],
            deadline=deadline,
            name=name,
        )
        if answer[0]:
            return Lease(
                name=name,
                owner=owner,
                token=int(answer[0]),
                ttl=request.ttl,
                # From when it was sent: the answer may have travelled longer than the lease
                # lives, and a late "yes" must not pass for a fresh one.
                deadline=sent_at + request.ttl * (1 - clock.DRIFT),
            )
        _, holder, kind, remaining, process_json, now = (text(field) for field in answer)
        return Contention(
            owner=holder,
            kind=cast(Kind, kind),
            remaining=int(remaining) / 1000,
            now=int(now) / 1000,
            process=process_from_json(process_json),
        )

    def wait(
        self,
        request: LeaseRequest,
        contention: Contention,
        *,
        until: float,
        deadline: float,
        interrupted: Callable[[], bool],
    ) -> Lease | None:
        started = clock.now()
        block = max(SHORTEST_BLOCK, min(contention.remaining + 0.002, LONGEST_BLOCK))
        block = min(block, until - started)
        if block <= 0:
            return None
        limit = min(deadline, started + block + self.command_timeout)

        def talk(connection: Any) -> None:
            # Never 0.000, which would be for ever; for Redis 6.2 so would be 0.001.
            seconds = f"{max(block, 0.005):.3f}"
            connection.send_command("BLPOP", self._wakes + request.name, seconds)
            while not connection.can_read(timeout=max(0.0, min(ASK_EVERY, limit - clock.now()))):
                if clock.now() >= limit:
                    raise errors.TimeoutError("no reply within the time allowed")
                if interrupted():
                    raise _Interrupted
            connection.read_response()

        try:
            self._connections.call(talk, deadline=limit, again_within=0.1)
        except _Interrupted:
            pass
        except FAILURES as error:
            # Cut off in the middle: ask at once who holds it now. Cut off at the start, that
            # would be a loop without a pause.
            if not isinstance(error, CUT) or clock.now() - started < 0.1:
                self._unavailable(error, request.name)
        return None

    def renew(self, renewals: Sequence[Renewal], *, process: str, deadline: float) -> Fates:
        fates: Fates = []
        for start in range(0, max(1, len(renewals)), RENEWALS_PER_CALL):
            chunk = renewals[start : start + RENEWALS_PER_CALL]
            answer, _ = self._run(
                scripts.RENEW,
                self._renew_keys(chunk),
                self._renew_args(chunk, process),
                deadline=deadline,
                name="",
            )
            fates += fates_of(answer)
        return fates

    def start_renew(
        self, renewals: Sequence[Renewal], *, process: str, deadline: float
    ) -> PendingRenewal:
        def on_a_thread() -> PendingRenewal:
            return BaseLockBackend.start_renew(self, renewals, process=process, deadline=deadline)

        if len(renewals) > RENEWALS_PER_CALL:
            return on_a_thread()
        connection = self._connections.idle()
        if connection is None:
            return on_a_thread()
        keys, args = self._renew_keys(renewals), self._renew_args(renewals, process)
        packed = connection.pack_command("EVALSHA", scripts.RENEW.sha, len(keys), *keys, *args)
        if sum(map(len, packed)) > BYTES_SENT_AT_ONCE:
            self._connections.give_back(connection)
            return on_a_thread()
        try:
            connection.send_packed_command(packed)
        except FAILURES:
            connection.disconnect()
            return on_a_thread()
        except BaseException:
            connection.disconnect()
            raise
        return SentRenewal(self._connections, connection, deadline, on_a_thread, self._unavailable)

    def _renew_keys(self, renewals: Sequence[Renewal]) -> Strings:
        return [self._beats, self._index, *(self._locks + renewal.name for renewal in renewals)]

    def _renew_args(self, renewals: Sequence[Renewal], process: str) -> Arguments:
        args: Arguments = [process, self._locks]
        for renewal in renewals:
            args += (renewal.owner, _ms(renewal.ttl))
        return args

    def release(self, name: str, owner: str, *, min_hold: float, deadline: float) -> Fate:
        answer, _ = self._run(
            scripts.RELEASE,
            self._keys(name),
            [name, owner, math.ceil(min_hold * 1000)],
            deadline=deadline,
            name=name,
        )
        return cast(Fate, text(answer))

    def undo(self, request: LeaseRequest, *, deadline: float) -> None:
        self._run(
            scripts.UNDO,
            [*self._keys(request.name), self._undone + request.owner],
            [request.name, request.owner, _ms(request.ttl + UNDONE_FOR)],
            deadline=deadline,
            name=request.name,
        )

    def locked(self, name: str, *, deadline: float) -> bool:
        answer, _ = self._run(
            scripts.LOCKED, [self._locks + name], [], deadline=deadline, name=name
        )
        return bool(answer)

    # -- operators ---------------------------------------------------------------------

    def get(self, name: str) -> LeaseInfo | None:
        keys = [self._locks + name, self._waiters + name, self._beats]
        row = self._ask(scripts.GET, keys, [name], name=name)
        return self._info(row) if row else None

    def list(
        self,
        *,
        prefix: str = "",
        contains: str = "",
        newest_first: bool = False,
        offset: int = 0,
        limit: int | None = None,
    ) -> LeaseInfos:
        searches = bool(prefix or contains)
        infos: LeaseInfos = []
        # One process may hold thousands of these leases. Remembered for this listing only: a
        # process may die at any moment.
        read, proof = functools.cache(process_from_json), functools.cache(death_proof)
        # Without a search the offset is a rank, which the server finds without counting.
        cursor, rank, skip = "", 0 if searches else offset, offset if searches else 0
        while (wanted := ROWS_PER_CALL if limit is None else limit - len(infos)) > 0:
            wanted = min(wanted, ROWS_PER_CALL)
            order = "1" if newest_first else "0"
            answer = self._ask(
                scripts.LIST,
                [self._index, self._beats],
                [self._locks, self._waiters, cursor, rank, skip, wanted, order, prefix, contains],
            )
            cursor, skip = text(answer[0]), int(answer[1])
            infos += (self._info(row, read, proof) for row in answer[2:])
            if not cursor:
                break
        return infos

    def count(self, *, prefix: str = "", contains: str = "") -> int:
        cursor, found = "", 0
        while True:
            answer = self._ask(
                scripts.COUNT, [self._index], [self._locks, cursor, prefix, contains]
            )
            cursor = text(answer[0])
            found += int(answer[1])
            if not cursor:
                return found

    def break_(self, name: str, *, owner: str, reason: str = "broken") -> bool:
        return bool(self._ask(scripts.BREAK, self._keys(name), [name, owner], name=name))

    def last_end(self, name: str) -> tuple[str, Fate] | None:
        answer = self._ask(scripts.LAST_END, [self._locks + name], [], name=name)
        return (text(answer[0]), cast(Fate, text(answer[1]))) if answer else None

    def goodbye(self, process: str, *, deadline: float) -> None:
        self._run(scripts.GOODBYE, [self._beats], [process], deadline=deadline, name="")

    def eviction_policy(self) -> str | None:
        deadline = self.call_deadline()

        def talk(connection: Any) -> Any:
            # Not CONFIG GET, which hosted servers refuse.
            connection.send_command("INFO", "memory")
            return self._connections.read(connection, deadline)

        try:
            lines = text(self._connections.call(talk, deadline=deadline)).splitlines()
        except FAILURES as error:
            self._unavailable(error)
        memory = dict(line.split(":", 1) for line in lines if ":" in line)
        policy = memory.get("maxmemory_policy", "noeviction")
        # Every lock has a TTL, so that "volatile-..." takes locks, too.
        limited = memory.get("maxmemory", "0") != "0"
        return policy if limited and policy != "noeviction" else None

    # -- housekeeping ------------------------------------------------------------------

    def after_fork(self) -> None:
        self._connections.forget()

    def close(self) -> None:
        self._connections.close()

    # -- inside ------------------------------------------------------------------------

    def _keys(self, name: str) -> Strings:
        return [self._locks + name, self._waiters + name, self._index, self._wakes + name]

    def _ask(
        self, script: Script, keys: Sequence[str], args: Sequence[str | int], *, name: str = ""
    ) -> Any:
        return self._run(script, keys, args, deadline=self.call_deadline(), name=name)[0]

    def _run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | int],
        *,
        deadline: float,
        name: str,
    ) -> tuple[Any, float]:
        """The script's answer, and the moment at which the answered request was sent."""
        read = self._connections.read

        def talk(connection: Any) -> tuple[Any, float]:
            sent_at = clock.now()
            connection.send_command("EVALSHA", script.sha, len(keys), *keys, *args)
            try:
                return read(connection, deadline), sent_at
            except errors.NoScriptError:
                sent_at = clock.now()
                connection.send_command("EVAL", script.source, len(keys), *keys, *args)
                return read(connection, deadline), sent_at

        try:
            return self._connections.call(talk, deadline=deadline)
        except FAILURES as error:
            self._unavailable(error, name)

    def _unavailable(self, error: BaseException, name: str = "") -> NoReturn:
        refused = isinstance(error, errors.ResponseError | errors.AuthenticationError)
        what = "Redis refused the command" if refused else "Redis gave no answer"
        # The latter is what a server with a password says to a long command without one.
        if isinstance(error, errors.AuthenticationError) or "unauthenticated" in str(error):
            what += f" (user or password of DLOCKS[{self.alias!r}] is wrong or missing)"
        raise BackendUnavailable(f"{what}: {error}", name, self.alias) from error

    def _info(
        self,
        row: Sequence[Any],
        read: Callable[[str], ProcessIdentity | None] = process_from_json,
        proof: Callable[..., object] = death_proof,
    ) -> LeaseInfo:
        name, owner, kind, token, at, renewals, process_json, metadata, ttl = map(text, row[:9])
        waiting, unheard, goodbye, now = (int(field) for field in row[9:])
        process = read(process_json)
        return LeaseInfo(
            name=name,
            alias=self.alias,
            kind=cast(Kind, kind),
            owner=owner,
            token=int(token),
            acquired_at=dt.datetime.fromtimestamp(int(at) / 1000, tz=dt.timezone.utc),
            age=(now - int(at)) / 1000,
            ttl=int(ttl) / 1000 if ttl else None,
            renewals=int(renewals),
            waiting=waiting,
            process=process,
            holder_state=holder_state(
                cast(Kind, kind),
                process,
                unheard=unheard / 1000,
                goodbye=bool(goodbye),
                proof=proof,
            ),
            metadata=json_object(metadata),
            unheard=unheard / 1000,
        )


class _Interrupted(Exception):
    """The waiter is told to stop; its connection still owes a reply and is dropped."""
