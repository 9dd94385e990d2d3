"""Counts what happens to locks, for Prometheus and for OpenTelemetry.

``DLOCK_METRICS`` in the settings names the exporters. Without it, nothing here is imported and
nothing is counted.
"""
