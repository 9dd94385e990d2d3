"""The scripts of the Redis backend, each one atomic step: ``lua/`` has a file for each.

**Hand-over.** An acquire that finds a holder, and may wait, becomes a waiter; if it asks again, it
keeps its position. Release, cancel and break give the name to the first waiter in the same step:
owner, a new token and the waiter's own data are written to the hash, with the full TTL that it
asked for, and the message ``<owner> <token> <MAC>`` is sent to the channel of its process; see
``handover_mac.py``. If nobody listens to that channel, the process is gone: the waiter is removed
and the next one is tried. A server that counts nobody although the process is subscribed says so
when the process asks, which then becomes no waiter, but asks again and again. If a process listens
but does not react, the lease expires; the next request then removes the other waiters of that
process. The message ``<owner> 0`` means "ask again": a release with ``min_hold`` hands nothing
over, but the name will be free earlier than the waiter expects. An expired lease is not handed
over; the next request gets the name.

**Keys.** A script touches only keys that its caller declares, so that it also runs on servers and
proxies that refuse others. What a script learns, such as the process of a holder, is read by the
next request: see ``processes.py``.

**Housekeeping.** Names whose lease has expired stay in the index until a script notices. Every
renewal, and now and then an acquire, returns 20 random names, which the next such call declares: it
removes the expired ones. As long as more than a quarter of them had expired, it returns four times
as many.
"""

from __future__ import annotations

from .lua_source import LUA, Script, code


def _script(command: str) -> Script:
    return Script(code(LUA / f"{command}.lua"))


ACQUIRE = _script("acquire")
ASK_AGAIN = _script("ask_again")
BREAK = _script("break")
CANCEL_ACQUIRE = _script("cancel_acquire")
CLEAN_INDEX = _script("clean_index")
DEREGISTER = _script("deregister")
LIST_LEASES = _script("list_leases")
LIST_NAMES = _script("list_names")
LIST_WAITERS = _script("list_waiters")
LOCKED = _script("locked")
READ_PROCESSES = _script("read_processes")
RELEASE = _script("release")
RENEW = _script("renew")

OUTCOMES = {
    "n": "renewed",
    "r": "released",
    "e": "expired",
    "b": "broken",
    "f": "refused",
}
"""The meaning of each character in ``RENEW``'s answer."""
