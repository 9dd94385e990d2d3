"""Which server is the master, by what the Sentinels of a service say.

After a fail-over, the old master may go on answering for a while: until the Sentinels make it a
replica, or, if it is cut off from them, without an end. Connections that are open already would
stay there. So the Sentinels are asked beside the renewals, on other threads, and the master that
they name is followed:

* The answer with the highest config epoch wins, whoever gives it: each fail-over raises the epoch,
  and a Sentinel that is cut off from the others still has the old one.
* A lower epoch wins only if a majority of the Sentinels answers and none of them names the present
  master: they were set up anew, or have lost a fail-over together with the one that led it.
* A Sentinel that does not answer changes nothing.

All Sentinels are asked at once, each at most once at a time, so that some that hang delay nobody.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, TypeAlias

from redis import exceptions as errors
from redis.sentinel import MasterNotFoundError

from ... import clock
from ...log import logger
from ..calls import Calls
from .commands import pack, text
from .connection import FAILURES, Connection, ErrorReply
from .pool import URGENT, Pool
from .route import Address, Route, Service

PATIENCE = 0.25
"""The part of a call's time for which Sentinels that have not answered are waited for, once one of
them has."""
OFTEN = 0.05
"""The part of ``command_timeout`` that passes at least between two rounds of questions."""


class Answer(NamedTuple):
    """What one Sentinel says.

    Attributes:
        epoch: The config epoch under which it names this master; -1 if it does not tell.
        is_down: Whether it cannot reach this master.
    """

    address: Address
    epoch: int
    is_down: bool


Question: TypeAlias = "Future[Answer | BaseException]"
"""Its result is never raised: an error is the reason why there is no answer."""


class _Sentinel:
    """One of them.

    Attributes:
        question: The one that it was asked last.
        answer: Its answer to that, once there is one.
        is_asked: Whether it has neither answered nor failed to.
    """

    def __init__(self, route: Route, service: str, timeout: float) -> None:
        # One connection is enough; a pool needs a second one for ordinary calls.
        self._pool, self._timeout = Pool(route, 2), timeout
        # The epoch is read first: it may be too old for the address, but never too new.
        self._packed = pack(["SENTINEL", "MASTER", service])
        self._packed += pack(["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service])
        self.forget()

    def forget(self) -> None:
        """Discard connections and questions, which belong to the parent of a forked child."""
        self._pool.forget()
        self.question: Question | None = None
        self.answer: Answer | None = None
        self.is_asked = False

    def close(self) -> None:
        self._pool.close()

    def ask(self) -> Answer:
        """
        Raises:
            redis.exceptions.RedisError, OSError: It knows no master, or gives no answer in time.
        """
        deadline = clock.now() + self._timeout

        def use(connection: Connection) -> Answer:
            connection.send(self._packed)
            facts: dict[str, str] = {}
            try:
                words = [text(word) for word in connection.read(deadline)]
                facts = dict(zip(words[::2], words[1::2], strict=True))
            except ErrorReply:
                pass  # It does not know the service, or the user may not ask that.
            named = connection.read(deadline)
            if not named:
                raise errors.ResponseError("it does not know this service")
            return _answer((text(named[0]), int(named[1])), facts)

        return self._pool.call(use, deadline, URGENT)


def _answer(address: Address, facts: dict[str, str]) -> Answer:
    # While it makes a replica the master, the other facts are still those of the old one.
    same = (facts.get("ip"), facts.get("port")) == (address[0], str(address[1]))
    is_down = same and bool({"s_down", "o_down"}.intersection(facts.get("flags", "").split(",")))
    return Answer(address, int(facts.get("config-epoch", -1)), is_down)


class Sentinels:
    """See the module.

    Args:
        route: Leads to the master; told which server that is.
        service: How to reach its Sentinels.
        timeout: Seconds for an answer.
        moved: Called once the master is another server than before, on any thread.
        alias: For the log.
    """

    def __init__(
        self,
        route: Route,
        service: Service,
        timeout: float,
        moved: Callable[[], None],
        alias: str,
    ) -> None:
        self._route, self._service, self._timeout = route, service.name, timeout
        self._moved, self._alias = moved, alias
        self._all = [_Sentinel(one, service.name, timeout) for one in service.sentinels]
        self._epoch = -1
        service.find = self.find
        self.after_fork()

    def after_fork(self) -> None:
        """Discard threads and connections of the parent; what is known stays known."""
        for one in self._all:
            one.forget()
        self._calls = Calls()
        # Reentrant, because no thread may be left to ask from while the interpreter ends.
        self._lock = threading.RLock()
        self._asked_at = -math.inf

    def close(self) -> None:
        for one in self._all:
            one.close()

    def watch(self, every: float = 0.0) -> None:
        """Ask them, without waiting, unless they were asked less than ``every`` seconds ago."""
        if clock.now() - self._asked_at >= max(every, OFTEN * self._timeout):
            self._ask()

    def find(self) -> Address:
        """The address of the master.

        Raises:
            MasterNotFoundError: No Sentinel tells, or the master is down.
        """
        asked_at, questions = clock.now(), self._ask()
        left = set(questions)
        while left:
            answers = _answers(questions)
            usable = any(it.address == self._route.master and not it.is_down for it in answers)
            if usable and 2 * len(answers) > len(self._all):
                break
            until = asked_at + (PATIENCE if usable else 1.0) * self._timeout
            answered, left = futures.wait(
                left, max(0.0, until - clock.now()), return_when=futures.FIRST_COMPLETED
            )
            if not answered:
                break
        answers, master = _answers(questions), self._route.master
        if master is None or not answers:
            reasons = "".join(f"; {it.result()}" for it in questions if it.done())
            raise MasterNotFoundError(f"No master found for {self._service!r}{reasons}")
        down = [answer.is_down for answer in answers if answer.address == master]
        if down and all(down):
            raise MasterNotFoundError(
                f"No master found for {self._service!r}: its Sentinels say that it is down"
            )
        return master

    # -- inside ------------------------------------------------------------------------

    def _ask(self) -> list[Question]:
        self._asked_at = clock.now()
        return [self._question(one) for one in self._all]

    def _question(self, one: _Sentinel) -> Question:
        question = one.question
        if question is None or question.done():
            one.answer, one.is_asked = None, True
            call = partial(self._answered, one)
            try:
                question = self._calls.submit(call)
            except RuntimeError:
                # No thread can start while the interpreter ends, but leases are still released.
                question = Future()
                question.set_result(call())
            one.question = question
        return question

    def _answered(self, one: _Sentinel) -> Answer | BaseException:
        """Ask one of them; returns its answer, or why there is none."""
        answer: Answer | BaseException
        try:
            try:
                answer = one.answer = one.ask()
            except FAILURES as error:
                answer = error.with_traceback(None)
            finally:
                one.is_asked = False
            self._consider()
        except Exception as error:
            logger.exception("Alias %r: asking a Sentinel failed", self._alias, alias=self._alias)
            answer = error.with_traceback(None)
        return answer

    def _consider(self) -> None:
        """Follow another master if the answers so far say so."""
        with self._lock:
            answers = [answer for one in self._all if (answer := one.answer) is not None]
            old = self._route.master
            best = max(answers, key=lambda answer: answer.epoch, default=None)
            if best is None or not self._wins(best, answers, old):
                return
            self._epoch, self._route.master = best.epoch, best.address
        if old is None or best.address == old:
            return
        logger.warning(
            "Alias %r: the master is now %s:%d (config epoch %d), no longer %s:%d",
            self._alias,
            *best.address,
            best.epoch,
            *old,
            alias=self._alias,
        )
        self._moved()

    def _wins(self, best: Answer, answers: list[Answer], master: Address | None) -> bool:
        if master is None or best.epoch > self._epoch:
            return True
        # Not before all have answered or failed to: the first one to know of a fail-over may be the
        # last one to answer.
        if any(one.is_asked for one in self._all) or 2 * len(answers) <= len(self._all):
            return False
        return all(answer.address != master for answer in answers)


def _answers(questions: list[Question]) -> list[Answer]:
    done = [question.result() for question in questions if question.done()]
    return [answer for answer in done if isinstance(answer, Answer)]
