"""Leases in a table of the project's own database: SQLite, PostgreSQL, MySQL or MariaDB."""

from .backend import DatabaseBackend

__all__ = ["DatabaseBackend"]
