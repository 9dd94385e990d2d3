"""Views under a lock, and views that run once for each ``Idempotency-Key``.

Here is only what ``locked_view`` needs; ``idempotent`` loads the records.
"""

from .locked import locked_view

__all__ = ["locked_view"]
