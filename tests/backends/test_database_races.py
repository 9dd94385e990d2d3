"""What a review of the database backend found: each test was red before."""

from __future__ import annotations
