"""Calls etcd through its JSON gateway, each call by one deadline.

urllib3 makes the connections, but its pool is not used: a call's deadline must cover name
resolution, connecting and handshake too, and a forked child must be able to leave its parent's
connections alone without waiting for a lock that one of the parent's threads held.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from http.client import HTTPException

from urllib3.exceptions import HTTPError
from urllib3.exceptions import TimeoutError as ClientTimeout
from urllib3.response import BaseHTTPResponse

from ... import clock
from ...exceptions import BackendRefused, BackendUnavailable
from ...text.redaction import SecretBytes, SecretText
from ..base import AliasOptions
from .config import EtcdOptions, Member, members, tls_context
from .entries import Json, prefix_of
from .pool import CutTls, Link, NotConnected, Pool

FAILURES = (HTTPError, HTTPException, OSError)
"""Errors of the network, or of the client, instead of an answer."""

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.2
"""Seconds before a call is repeated."""
SHORTEST = 0.001
"""Seconds; a timeout of 0 would make the socket non-blocking."""

# Codes of gRPC, which the gateway passes on.
_BAD_ARGUMENT, _NOT_FOUND, _DENIED, _FULL = 3, 5, 7, 8
_PRECONDITION, _OUT_OF_RANGE, _UNIMPLEMENTED, _UNAUTHENTICATED = 9, 11, 12, 16
_REFUSALS = frozenset({_BAD_ARGUMENT, _PRECONDITION, _UNIMPLEMENTED, _UNAUTHENTICATED})
"""Repeating the call would not help. With all other codes it may: there is no leader now, a
member starts, the cluster has too much to do."""


class NotFound(BackendRefused):
    """etcd has no such lease."""


class RevisionGone(BackendRefused):
    """etcd has compacted the revision that was to be read."""


class Denied(BackendRefused):
    """The user may not use our keys."""


class _Repeat(Exception):
    """The member has answered that it cannot carry out the call now."""


class _TokenOver(Exception):
    """etcd no longer knows the token that authenticates this client."""


class Client:
    """Calls whichever member answers; for many threads.

    Raises:
        InvalidLockBackend: A file for TLS cannot be read.
    """

    def __init__(self, options: AliasOptions, own: EtcdOptions) -> None:
        self.alias = options.alias
        at = members(options)
        self._keys = prefix_of(options.key_prefix)
        self._tls = tls_context(options.alias, own) if at[0].scheme == "https" else None
        self._user = own.username
        # Error pages show the variables of each function, and some of them get it.
        self._password = None if own.password is None else SecretText(own.password)
        self._pools = [Pool(member, self._tls, options.command_timeout) for member in at]
        self.forget()

    def forget(self) -> None:
        """Start again in a forked child, sending nothing on the parent's connections."""
        # Closing them sends nothing, and leaves those of the parent open.
        for pool in self._pools:
            pool.close()
            pool.forget()
        self._answered = False
        self._at = 0
        self._token = ""

    def close(self) -> None:
        """Close idle connections."""
        for pool in self._pools:
            pool.close()

    def close_unused(self) -> None:
        """Close the connections that no call has used for a minute."""
        for pool in self._pools:
            pool.close_unused()

    def authenticate_again(self) -> None:
        """Authenticate before the next call, if a user is configured."""
        self._token = ""

    def call(self, path: str, body: Json, *, deadline: float) -> Json:
        """The answer to one call; repeated on the next member while none answers.

        So it may be carried out more than once, also after this has returned.

        Returns:
            The JSON object, with the member's time (seconds since the epoch) as ``date``, and
            whether an earlier copy may have been carried out as ``repeated``.

        Raises:
            NotFound: etcd has no such lease.
            RevisionGone: etcd no longer has the revision that the call names.
            BackendRefused: Credentials or rights do not suffice, TLS fails, an argument is bad, a
                disk is full, or it is not etcd.
            BackendUnavailable: No answer by the deadline, or no member can be reached.
        """
        failure: Exception | None = None
        pause, unreachable, authenticated, repeated = 0.0, 0, False, False
        while (left := deadline - clock.now()) > pause:
            if pause:
                time.sleep(pause)
                left -= pause
            pool = self._pools[self._at % len(self._pools)]
            # Keep time for the other members.
            timeout = left if len(self._pools) == 1 else left / 2
            began_at = deadline - left
            sent = False
            try:
                if self._user is not None and not self._token:
                    self._authenticate(pool, clock.now() + timeout)
                    authenticated = True
                sent = True
                answer = self._answer(pool, path, body, clock.now() + timeout)
                return {**answer, "repeated": repeated}
            except _TokenOver as error:
                if authenticated:
                    raise BackendRefused(f"etcd: {error}", "", self.alias) from error
                self._token, failure = "", error
                continue
            except (NotConnected, _Repeat, *FAILURES) as error:
                failure = error
                if isinstance(error, TimeoutError | ClientTimeout):
                    for each in self._pools:
                        each.suspect(began_at)
                repeated = repeated or (sent and not isinstance(error, NotConnected))
                unreachable = unreachable + 1 if _is_out_of_reach(error) else 0
                if unreachable == len(self._pools):
                    raise self._unavailable(error) from error
            self._at += 1
            pause = min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
        raise self._unavailable(failure)

    def stream(self, path: str, body: Json, *, timeout: float) -> Stream:
        """Make a call whose answer does not end.

        Args:
            timeout: Seconds for connecting, and for each part of the answer.

        Raises:
            BackendUnavailable: No connection, or no answer.
        """
        pool = self._pools[self._at % len(self._pools)]
        deadline = clock.now() + timeout
        try:
            if self._user is not None and not self._token:
                self._authenticate(pool, deadline)
            link = pool.connect(deadline)
            try:
                response = self._send(link, path, body, deadline)
                if response.status != 200:
                    self._raise_for(pool.member, response.status, response.data)
            except BaseException:
                link.close()
                raise
        except _TokenOver as error:
            self._token = ""
            raise self._unavailable(error) from error
        except (NotConnected, _Repeat, *FAILURES) as error:
            self._at += 1
            raise self._unavailable(error) from error
        return Stream(link, response, timeout)

    # -- inside ------------------------------------------------------------------------

    def _unavailable(self, error: BaseException | None) -> BackendUnavailable:
        cause = error if error is None else error.__cause__ or error
        if _is_refusal(cause):
            return BackendRefused(f"etcd: TLS failed: {cause}", "", self.alias)
        text = f"etcd: {error or 'no answer in time'}"
        if isinstance(error, ConnectionError) and self._tls is None and not self._answered:
            text += " (does it want https://?)"
        return BackendUnavailable(text, "", self.alias)

    def _authenticate(self, pool: Pool, deadline: float) -> None:
        body = {"name": self._user, "password": self._password}
        self._token = self._answer(pool, "/v3/auth/authenticate", body, deadline)["token"]

    def _answer(self, pool: Pool, path: str, body: Json, deadline: float) -> Json:
        link = pool.take(deadline)
        try:
            response = self._send(link, path, body, deadline)
            data = response.data
        except BaseException:
            # Its answer may still come, and must not be taken for that of the next call.
            link.close()
            raise
        self._answered = True
        pool.keep(link)
        if response.status != 200:
            self._raise_for(pool.member, response.status, data)
        answer = _json(data)
        if answer is None:
            raise self._no_gateway(pool.member)
        answer["date"] = _seconds(response.headers.get("Date", ""))
        return answer

    def _send(self, link: Link, path: str, body: Json, deadline: float) -> BaseHTTPResponse:
        connection = link.http
        connection.timeout = _left(deadline)
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        # It may contain the password, and goes through urllib3.
        content = SecretBytes(json.dumps(body).encode())
        connection.request("POST", path, body=content, headers=headers, preload_content=False)
        connection.timeout = _left(deadline)
        return connection.getresponse()

    def _raise_for(self, member: Member, status: int, data: bytes) -> None:
        answer = _json(data)
        message = (answer or {}).get("error") or (answer or {}).get("message")
        if answer is None or not isinstance(message, str):
            if status >= 500:
                # Such as a proxy that has lost its etcd.
                raise _Repeat(f"{member} answers with status {status}")
            raise self._no_gateway(member)
        code = answer.get("code")
        if code == _UNAUTHENTICATED or "auth store is old" in message:
            raise _TokenOver(message)
        if code == _NOT_FOUND:
            raise NotFound(f"etcd: {message}", "", self.alias)
        if code == _OUT_OF_RANGE:
            raise RevisionGone(f"etcd: {message}", "", self.alias)
        if code == _DENIED:
            raise Denied(f"etcd: {message} for the keys {self._keys}…", "", self.alias)
        if code in _REFUSALS or (code == _FULL and "space" in message):
            raise BackendRefused(f"etcd: {message}", "", self.alias)
        raise _Repeat(message)

    def _no_gateway(self, member: Member) -> BackendRefused:
        return BackendRefused(
            f"{member} does not answer as the JSON gateway of etcd 3.4 or newer does; correct "
            "LOCATION",
            "",
            self.alias,
        )


class Stream:
    """The lines of an answer that does not end; iterate on one thread.

    Args:
        timeout: Seconds without a line after which iteration raises.
    """

    def __init__(self, link: Link, response: BaseHTTPResponse, timeout: float) -> None:
        self._link, self._response = link, response
        self._socket = link.http.sock
        self._socket.settimeout(timeout)

    def __iter__(self) -> Iterator[Json]:
        """Raises one of ``FAILURES`` when the connection breaks or is silent for too long."""
        for line in self._response:
            answer = _json(line) if line.strip() else None
            if answer is not None:
                yield answer

    def be_patient(self, timeout: float) -> None:
        """Set the seconds without a line after which iteration raises."""
        self._socket.settimeout(timeout)

    def interrupt(self) -> None:
        """Make iteration end; for another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._response.close()
        self._link.close()


def _is_refusal(error: BaseException | None) -> bool:
    """Whether the certificates or the settings for TLS are wrong."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, CutTls)


def _is_out_of_reach(error: Exception) -> bool:
    """Whether the member has certainly not received the call, and will not receive the next."""
    # A member refuses the client's certificate only when it has read the first call.
    return isinstance(error, NotConnected) or _is_refusal(error)


def _left(deadline: float) -> float:
    return max(SHORTEST, deadline - clock.now())


def _json(data: bytes) -> Json | None:
    """The JSON object in ``data``; ``None`` if there is none."""
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _seconds(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return 0.0
