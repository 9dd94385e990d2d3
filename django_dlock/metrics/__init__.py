"""Counts what happens to locks, for Prometheus, OpenTelemetry and the admin.

``DLOCK_METRICS`` in the settings names the exporters. Without it, nothing here is imported and
nothing is counted.
"""
