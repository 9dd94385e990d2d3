"""A PostgreSQL for the tests: one named by a URL, or one started from installed programs."""

from __future__ import annotations

from testproject.postgres import database, settings_for
from testproject.servers import ServerNotFound as PostgresNotFound

__all__ = ["PostgresNotFound", "database", "settings_for"]
