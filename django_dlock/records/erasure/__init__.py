"""Erases what is kept of one key or of one person, and says what it could not find."""

from .subject import Criterion, Subject
from .tables import Erasure, erase

__all__ = ["Criterion", "Erasure", "Subject", "erase"]
