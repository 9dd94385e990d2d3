"""A process that prints which modules its first acquire imports.

Run as ``python -m tests.support.first_acquire DATABASE [URL]``: the project's SQLite file, which
keeps the locks unless the URL of a Redis is given.
"""

from __future__ import annotations

import sys

from django.conf import settings

from tests.support.turns import configure


def main(database: str, url: str = "") -> None:
    configure(database)
    if url:
        backend = "django_dlock.backends.redis.RedisBackend"
        settings.DLOCKS = {"default": {"BACKEND": backend, "LOCATION": url}}
    from django_dlock import Lock, locks

    # Imports the backend.
    locks["default"]
    before = set(sys.modules)
    with Lock("name"):
        pass
    print("imported:", *sorted(set(sys.modules) - before))


if __name__ == "__main__":
    main(*sys.argv[1:])
