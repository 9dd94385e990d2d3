"""Celery's own integration tests, run with ``LockedTask`` as the class of every task."""
