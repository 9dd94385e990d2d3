"""Times as the project's database stores them, and as its users read them.

With ``USE_TZ`` Django stores UTC, or what ``DATABASES[…]["TIME_ZONE"]`` says. Without it, a time is
naive and in the zone of ``TIME_ZONE``, both in the database and in Python: ``timezone.now()`` then
has no zone, and ``timezone.localtime()`` refuses it.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db.models import functions
from django.utils import timezone


class Now(functions.Now):
    """The database's clock, in the zone in which Django stores times there.

    SQLite's own function tells UTC, and MySQL's the zone of its server.
    """

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        template = f"(UTC_TIMESTAMP(6) + INTERVAL {_offset(connection)} SECOND)"
        return self.as_sql(compiler, connection, template=template, **extra)

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        form = "%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f"
        template = f"STRFTIME('{form}', 'NOW', '{_offset(connection):+d} seconds')"
        return self.as_sql(compiler, connection, template=template, **extra)


def _offset(connection: Any) -> int:
    """Seconds by which the zone of the stored times is ahead of UTC now."""
    zone = connection.timezone or timezone.get_default_timezone()
    ahead = dt.datetime.now(zone).utcoffset() or dt.timedelta()
    return int(ahead.total_seconds())


def local_time(when: dt.datetime) -> dt.datetime:
    """A time in the visitor's zone; one without a zone is local already."""
    return timezone.localtime(when) if timezone.is_aware(when) else when
