"""Races in the database backend; without its correction, each of these tests fails."""

from __future__ import annotations
