"""The database's clock, for what is stored and compared in its tables."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db.models import functions

__all__ = ["Now"]


class Now(functions.Now):
    """The database's time as Django stores times; MySQL's own would be in its server's zone."""

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        template = "UTC_TIMESTAMP(6)" if settings.USE_TZ else "CURRENT_TIMESTAMP(6)"
        return self.as_sql(compiler, connection, template=template, **extra)
