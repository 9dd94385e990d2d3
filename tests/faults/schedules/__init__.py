"""Schedules of faults, drawn at random, against real servers of every store.

``python -m tests.faults.schedules --store etcd --minutes 10 --seed 1`` starts the servers of one
store, and a few processes whose threads and coroutines acquire, hold and release locks. Faults are
drawn from the seed. Everybody appends to one history, which is judged only at the end.

* ``bed``: a store's servers and its faults; ``beds_redis`` and ``beds_others`` have one for each.
* ``client``: the processes that lock.
* ``draws``: which fault when; ``drive`` makes them; ``scenarios`` are fixed instead of drawn.
* ``checker``: judges a history, without a server and without a clock.
"""
