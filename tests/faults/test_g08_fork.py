"""G8: a forked child neither holds, renews nor releases, and can lock for itself at once."""

from __future__ import annotations

import os
import signal

import pytest

from django_dlock import Lock, locks
from tests.faults.conftest import LEASE
from tests.support.aliases import LONG, TTL, Dlocks
from tests.support.holder import Holder


@pytest.fixture
def parent(dlocks: Dlocks, holder: Holder) -> Holder:
    """A process that holds ``it`` and will fork.

    Its lease is too long to be in doubt or to be lost on a busy machine.
    """
    holder.do(
        f"lock = Lock('it', ttl={LONG}, on_lost=lambda lock, reason: say('on_lost', reason));"
        " lock.acquire()"
    )
    return holder


def test_g8_handles_in_a_child_have_the_state_lost(parent: Holder) -> None:
    answers = parent.do(
        "in_fork('lock.state, lock.lost_reason, lock.held, lock.lost, lock.remaining')"
    )
    assert answers == ["lost", "fork", False, True, 0.0]
    assert parent.do("lock.state") == "held"
    # A fork is no event: neither child nor parent reports a loss.
    assert parent.said == []


@pytest.mark.parametrize("call", ["check", "renew", "release"])
def test_g8_a_child_cannot_use_its_parents_lock(parent: Holder, call: str) -> None:
    assert "LeaseLost" in parent.do(f"in_fork('lock.{call}()')")
    parent.do("lock.renew()")


def test_g8_a_child_leaves_its_parents_block_silently(parent: Holder) -> None:
    parent.do(
        "def enter():\n"
        "    global other\n"
        f"    with Lock('other', ttl={LONG}) as other:\n"
        "        say(in_fork('other.__exit__(None, None, None), other.state'))\n"
        "        say(other.locked(), other.state)"
    )
    parent.do("enter()")
    assert parent.said == [[[None, "lost"]], [True, "held"]]


def test_g8_a_child_that_locks_for_itself_in_its_parents_block_leaves_it_silently(
    parent: Holder,
) -> None:
    parent.do("other = Lock('other', ttl=0.5, renew=False); other.__enter__()")
    leave = "[other.acquire(timeout=20), other.held, other.__exit__(None, None, None), other.state]"
    assert parent.do(f"in_fork({leave!r})") == [True, True, None, "free"]


def test_g8_a_child_does_not_release_at_its_end(parent: Holder) -> None:
    # The child ends like one of multiprocessing, with its finalizers.
    parent.do(
        "child = multiprocessing.get_context('fork').Process(target=len, args=['']);"
        "child.start(); child.join()"
    )
    assert parent.do("child.exitcode") == 0
    parent.do("lock.renew()")
    assert parent.do("lock.state") == "held"


def test_g8_a_child_does_not_renew_for_its_parent(parent: Holder) -> None:
    parent.do(f"lock.renew(ttl={LEASE})")
    # Both stay alive; the parent is stopped, so that only the child could renew.
    parent.do("child = os.fork() or signal.pause()")
    parent.pause()
    assert Lock("it").acquire(timeout=TTL + 20)
    parent.resume()
    parent.do("os.kill(child, 9)")


def test_g8_a_child_can_lock_for_itself_at_once(parent: Holder) -> None:
    mine = "[(l := Lock('mine')).acquire(timeout=20), l.token > 0, l.renew(), l.release(), l.state]"
    assert parent.do(f"in_fork({mine!r})") == [True, True, None, None, "free"]
    # It uses its own connections: the parent's connections still work for the parent.
    parent.do("lock.renew()")


def test_g8_a_child_renews_its_own_lock_and_waits_for_its_parents(parent: Holder) -> None:
    parent.do(f"lock.renew(ttl={LEASE})")
    mine = "[(l := Lock('mine')).acquire(), Lock('it').acquire(timeout=%s), l.held, l.release()]"
    assert parent.do(f"in_fork({mine % (2 * TTL)!r})") == [True, False, True, None]
    assert parent.do("lock.held")


def test_g8_a_child_forked_while_threads_lock_can_lock(dlocks: Dlocks, holder: Holder) -> None:
    # Fork only after the imports: a child forked during an import hangs in Python itself.
    holder.do("with Lock('warm'): pass")
    holder.do(
        "stop = threading.Event()\n"
        "def churn(n):\n"
        "    while not stop.is_set():\n"
        "        with Lock(f'churn:{n}'): pass\n"
        "threads = [threading.Thread(target=churn, args=[n]) for n in range(4)]\n"
        "for thread in threads: thread.start()"
    )
    mine = "[(l := Lock('mine')).acquire(timeout=20), l.release()]"
    for _ in range(20):
        assert holder.do(f"in_fork({mine!r})") == [True, None]
    holder.do("stop.set()\nfor thread in threads: thread.join()")


def test_g8_a_holder_may_die_while_its_child_lives(parent: Holder) -> None:
    parent.do(f"long = Lock('long', ttl={LONG}); long.acquire()")
    parent.do("child = os.fork() or signal.pause()")
    child = parent.do("child")
    parent.kill()
    try:
        assert Lock("long").acquire(timeout=20)
    finally:
        os.kill(child, signal.SIGKILL)


# -- forks that Python does not see, such as those of uWSGI ------------------------------------


def test_g8_handles_are_lost_after_an_unseen_fork(parent: Holder) -> None:
    answers = parent.do("in_unseen_fork('lock.held, lock.state, lock.lost_reason')")
    assert answers == [False, "lost", "fork"]
    assert "LeaseLost" in parent.do("in_unseen_fork('lock.release()')")
    parent.do("lock.renew()")
    assert parent.said == []


def test_g8_after_an_unseen_fork_a_child_locks_and_renews_for_itself(parent: Holder) -> None:
    # The parent's watchdog is not there, though Python says that its thread is alive. The last
    # acquire waits for longer than a lease lasts that nobody renews.
    mine = (
        "[(l := Lock('mine')).acquire(timeout=20), Lock('it').acquire(timeout=%s), l.held,"
        " l.renew(), l.release(), l.state, locks['default'].get('it').name]"
    )
    answers = parent.do(f"in_unseen_fork({mine % (2 * TTL)!r})")
    assert answers == [True, False, True, None, None, "free", "it"]
    # It has not used its parent's connections.
    parent.do("lock.renew()")


def test_g8_after_an_unseen_fork_all_threads_lock(parent: Holder) -> None:
    parent.do(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def churn(n):\n"
        "    with Lock(f'churn:{n}'):\n"
        "        return lock.lost_reason\n"
        "def side_by_side():\n"
        "    with ThreadPoolExecutor(8) as pool:\n"
        "        return list(pool.map(churn, range(8)))"
    )
    assert parent.do("in_unseen_fork('side_by_side()')") == ["fork"] * 8


def test_g8_after_an_unseen_fork_the_end_of_a_child_releases_nothing(parent: Holder) -> None:
    parent.do("from django_dlock import process\nimport atexit")
    # It has used no lock of its own.
    parent.do("in_unseen_fork('atexit._run_exitfuncs()')")
    parent.do("lock.renew()")
    assert parent.do("lock.held")


# -- children of multiprocessing whose threads outlive their main function ---------------------


CHILD = """
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import util

def child(told, answers):
    working = threading.Event()
    def work():
        lock = Lock('work', ttl=60, on_lost=lambda lock, reason: answers.put('lost'))
        with lock:
            working.set()
            # Not before the finalizers have run, if they run before the threads have ended.
            told.get()
            answers.put((lock.state, later.acquire(blocking=False)))
            told.get()
            lock.check()
        answers.put(lock.state)
    # It waits for work, and ends with the process.
    pool = ThreadPoolExecutor(1)
    pool.submit(other.acquire).result()
    threading.Thread(target=work).start()
    working.wait()
    if sys.version_info < (3, 13):
        # The last finalizer.
        util.Finalize(None, answers.put, args=('finalized',), exitpriority=-1000)
    else:
        # Finalizers run after the threads there.
        answers.put('finalized')

later, other = Lock('later'), Lock('other')
told, answers = (multiprocessing.get_context('fork').SimpleQueue() for _ in range(2))
process = multiprocessing.get_context('fork').Process(target=child, args=(told, answers))
process.start()
"""


def test_g8_the_locks_of_a_child_last_as_long_as_its_threads(holder: Holder) -> None:
    holder.do(CHILD)
    assert holder.do("answers.get()") == "finalized"
    assert not Lock("work").acquire(blocking=False)
    holder.do("told.put(1)")
    assert holder.do("answers.get()") == ["held", True]
    later = locks["default"].get("later")
    assert later is not None
    assert later.holder_state == "alive"
    holder.do("told.put(1)")
    assert holder.do("answers.get()") == "free"
    holder.do("process.join()")
    assert holder.do("process.exitcode") == 0
    # What the threads have left is released at the end.
    assert Lock("later").acquire(blocking=False)
    assert Lock("other").acquire(blocking=False)


def test_g4_a_lock_that_is_taken_while_the_process_ends_is_not_dead(holder: Holder) -> None:
    # As by a thread that still works when the locks of the process have been released.
    holder.do("from django_dlock.core import watchdog; Lock('warm').acquire(); watchdog.shutdown()")
    holder.do("later = Lock('later'); later.acquire()")
    later = locks["direct"].get("later")
    assert later is not None
    assert later.holder_state == "alive"
