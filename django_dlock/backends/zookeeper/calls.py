"""Makes calls on the session of this process: opens it, and repeats what a broken connection cut.

Every call may be repeated, because it finds what an earlier one has done.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
)

from ... import clock
from ...exceptions import BackendRefused, BackendUnavailable
from ..alias import AliasOptions
from .config import ZooKeeperOptions
from .session import NoAnswer, Session

T = TypeVar("T")

PAUSE = 0.02
"""Seconds before a call whose connection broke is repeated."""

BROKEN = (
    ConnectionClosedError,
    ConnectionLoss,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
)
REFUSED = (AuthFailedError, InvalidACLError, NoAuthError)


class SessionCalls:
    """See the module.

    Args:
        listener: Told ``suspended`` or ``lost`` of the present session, on the client's thread.
    """

    def __init__(
        self, options: AliasOptions, own: ZooKeeperOptions, listener: Callable[[str], None]
    ) -> None:
        self._options, self._own = options, own
        self._listener = listener
        # Reentrant: a signal handler may lock while its thread is in here.
        self._lock = threading.RLock()
        self._session: Session | None = None

    @property
    def session(self) -> Session | None:
        """The present session, if there is one."""
        return self._session

    def call(self, step: Callable[[Session], T], name: str, deadline: float) -> T:
        """Carry out a step, again on a new connection if one breaks.

        Raises:
            BackendUnavailable: No answer by the deadline.
            BackendRefused: No rights.
        """

        def once(session: Session) -> tuple[T]:
            return (step(session),)

        return self.repeat(once, name, deadline)[0]

    def repeat(self, step: Callable[[Session], T | None], name: str, deadline: float) -> T:
        """As ``call``; also repeats a step that returns ``None``."""
        while True:
            session = self._open()
            error: Exception | None = None
            try:
                session.connect(deadline)
                self._prepare(session, deadline)
                answer = step(session)
                if answer is not None:
                    return answer
                trouble = "other requests were always faster"
            except NoAnswer as silence:
                raise self._unavailable(str(silence), name) from silence
            except BROKEN as broken:
                error, trouble = broken, session.trouble or type(broken).__name__
                time.sleep(max(0.0, min(PAUSE, deadline - clock.now())))
            except REFUSED as refusal:
                message = (
                    f"ZooKeeper refuses the credentials or the rights on {session.root}: "
                    f"{type(refusal).__name__}"
                )
                raise BackendRefused(message, name, self._options.alias) from refusal
            except NoNodeError as gone:
                # Somebody has deleted the directories.
                error, trouble, session.prepared = gone, f"{session.root} is gone", False
            except KazooException as answered:
                raise self._unavailable(repr(answered), name) from answered
            if clock.now() >= deadline:
                raise self._unavailable(trouble, name) from error

    def end(self, patience: float) -> bool:
        """End the session, if there is one; waits no longer than ``patience``."""
        with self._lock:
            session, self._session = self._session, None
        if session is None or session.pid != os.getpid():
            return False
        session.close(patience)
        return True

    def forget(self) -> None:
        """Leave the session to the parent; runs in a forked child."""
        session, self._session = self._session, None
        self._lock = threading.RLock()
        if session is not None:
            session.forget()

    def _open(self) -> Session:
        with self._lock:
            session = self._session
            if session is None or session.ended or session.pid != os.getpid():
                if session is not None and session.ended:
                    session.close(0.0)
                session = self._session = Session(self._options, self._own, self._listen)
            return session

    def _listen(self, session: Session, event: str) -> None:
        if session is self._session:
            self._listener(event)

    def _prepare(self, session: Session, deadline: float) -> None:
        """Make the directory of the alias, once per session."""
        if session.prepared:
            return
        client = session.client
        if session.answer(client.exists_async(session.root), deadline) is None:
            try:
                session.answer(client.create_async(session.root), deadline)
            except NodeExistsError:
                pass
            except NoNodeError as error:
                message = f"LOCATION names the chroot {client.chroot!r}, which does not exist"
                raise BackendRefused(message, "", self._options.alias) from error
        session.prepared = True

    def _unavailable(self, trouble: str, name: str) -> BackendUnavailable:
        location = self._options.location or ()
        where = location if isinstance(location, str) else ",".join(location)
        return BackendUnavailable(f"ZooKeeper at {where}: {trouble}", name, self._options.alias)
