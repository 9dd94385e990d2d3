"""The fault suite: every way a task can run twice, or not at all, on real workers and servers.

``python -m tests.faults.suite`` runs all of it; ``tests/faults/test_suite_short.py`` a short form.
The modules, from the bottom: ``journal`` (all events, line by line), ``kinds`` and ``workload``
(the tasks in the workers), ``brokers``, ``locks`` and ``stage`` (servers and workers), ``watch``
(deaths and leases), ``run`` (publishes tasks, makes faults, waits for the end), ``scenarios`` (the
faults), ``checker`` (counts doubles and losses afterwards), ``outcome`` (runs and judges one
scenario) and ``report`` (the table). ``soak`` uses ``draws``, ``stream`` and ``trouble`` to make
faults at random.
"""
