"""A process that holds locks, and that a test can pause, interrupt and kill.

It reads lines of Python from its standard input and answers each with its value or its error. It
reports other events (a loss, a call of ``on_lost``) without being asked. So a test waits for
events, and never for time to pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from django.conf import settings as current

from tests.support.aliases import Dlocks

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 40.0


class HolderError(Exception):
    """The error that the line raised in the process; ``kind`` is the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@final
class Holder:
    """The process; a context manager that kills it at the end.

    Args:
        dlocks: Its ``DLOCKS``.
        env: Additions to its environment.
        settings: Additions to its settings; by default it has no database and no app.
        within: The command that starts it, such as ``nsenter`` with its options.
    """

    def __init__(
        self,
        dlocks: Dlocks,
        *,
        env: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self._changed = threading.Condition()
        self._answers: list[dict[str, Any]] = []
        self._said: list[list[Any]] = []
        self._process = subprocess.Popen(
            [
                *(*within, sys.executable, "-m", "tests.support.holder"),
                json.dumps(
                    {
                        # With another one, each hand-over would be confirmed.
                        "SECRET_KEY": current.SECRET_KEY,
                        "DLOCKS": dlocks,
                        "DATABASES": {},
                        **(settings or {}),
                    }
                ),
            ],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    # -- commands and answers --------------------------------------------------

    def do(self, code: str) -> Any:
        """Run one or several lines, and return the value of an expression.

        Raises:
            HolderError: The code raised.
        """
        self.begin(code)
        return self.answer()

    def begin(self, code: str) -> None:
        """As ``do``, without waiting for the answer; call ``answer`` for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout: float = PATIENCE) -> Any:
        """The answer to the line that was begun first."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._answers, timeout):
                raise AssertionError(f"no answer within {timeout} s; said {self._said}")
            answer = self._answers.pop(0)
        if "error" in answer:
            raise HolderError(*answer["error"])
        return answer["value"]

    @property
    def answered(self) -> bool:
        """Whether an answer has arrived."""
        return bool(self._answers)

    @property
    def said(self) -> list[list[Any]]:
        """All messages that it sent without being asked, in order."""
        return list(self._said)

    def wait_until_said(self, *words: Any, timeout: float = PATIENCE) -> None:
        """Block until it has sent these words."""
        with self._changed:
            if not self._changed.wait_for(lambda: list(words) in self._said, timeout):
                raise AssertionError(f"{words} not said within {timeout} s, but {self._said}")

    # -- faults ------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._process.pid

    def pause(self) -> None:
        """Stop the whole process and return once it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        """Block until it has stopped, perhaps by itself."""
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill it without any clean-up, and reap it."""
        self._process.kill()
        self._process.wait()

    def kill_unreaped(self) -> None:
        """Kill it, and leave a zombie until the end of the test."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> int:
        """Let it shut down normally; return its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(PATIENCE)

    # -- internals ------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._process.stdout is not None
        # The reader has closed it; a forked child may keep the other end open.
        with self._process.stdout as lines:
            for line in lines:
                told = json.loads(line)
                with self._changed:
                    if "said" in told:
                        self._said.append(told["said"])
                    else:
                        self._answers.append(told)
                    self._changed.notify_all()


# -- in the process ------------------------------------------------------------------------

_mouth = threading.Lock()


def _tell(**what: Any) -> None:
    with _mouth:
        sys.stdout.write(json.dumps(what, default=repr) + "\n")
        sys.stdout.flush()


def say(*words: Any) -> None:
    """Send the test a message that it did not ask for."""
    _tell(said=words)


def in_fork(code: str, scope: dict[str, Any], fork: Callable[[], int] = os.fork) -> Any:
    """The value of an expression in a forked child, which then ends without clean-up."""
    readable, writable = os.pipe()
    child = fork()
    if child == 0:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            answer = _run(code, scope)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writable, json.dumps(answer, default=repr).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    return answer


def unseen_fork() -> int:
    """Fork as a server written in C does: Python calls no hooks.

    Python itself does not survive that if another thread is about to run, so let them come to rest.
    """
    time.sleep(0.2)
    return ctypes.PyDLL(None).fork()


def _run(code: str, scope: dict[str, Any]) -> Any:
    try:
        expression = compile(code, "<test>", "eval")
    except SyntaxError:
        exec(code, scope)
        return None
    return eval(expression, scope)


def _serve(configuration: dict[str, Any]) -> None:
    import django
    from django.conf import settings

    # A shell makes its background processes ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.configure(**configuration)
    django.setup()

    from django_dlock import LeaseLost, Lock, locks, signals

    scope: dict[str, Any] = {"LeaseLost": LeaseLost, "Lock": Lock, "locks": locks, "say": say}
    scope.update(multiprocessing=multiprocessing, os=os, signal=signal, threading=threading)
    scope["in_fork"] = lambda code: in_fork(code, scope)
    scope["in_unseen_fork"] = lambda code: in_fork(code, scope, unseen_fork)

    def lost(reason: str, name: str, **facts: Any) -> None:
        say("lost", name, reason)

    def in_doubt(name: str, **facts: Any) -> None:
        say("in_doubt", name)

    signals.lost.connect(lost)
    signals.in_doubt.connect(in_doubt)
    for line in sys.stdin:
        try:
            answer = {"value": _run(json.loads(line), scope)}
        except BaseException as error:
            answer = {"error": [type(error).__name__, str(error)]}
        _tell(**answer)


if __name__ == "__main__":
    # A shell makes its background processes ignore SIGINT, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _serve(json.loads(sys.argv[1]))
