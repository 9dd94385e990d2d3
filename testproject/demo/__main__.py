"""``python -m testproject.demo [serve | --database [postgresql] | --metrics | --write PAGE]``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from testproject.servers import ServerNotFound

from . import interrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testproject.demo", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["run", "serve"], default="run")
    parser.add_argument(
        "--database",
        nargs="?",
        const="sqlite",
        choices=["sqlite", "postgresql"],
        help="keep locks in the database, and messages in files; without Redis or RabbitMQ",
    )
    parser.add_argument(
        "--metrics",
        action="store_true",
        help="count for Prometheus, too, and compare that with what the demonstration counts",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="put the table into a page, such as README.md, if everything was shown",
    )
    arguments = parser.parse_args()
    what = arguments.what
    if what == "serve" and arguments.database:
        parser.error("--database goes with run, and not with serve")
    if arguments.metrics and importlib.util.find_spec("prometheus_client") is None:
        parser.error('--metrics needs prometheus-client: pip install "django-dlock[prometheus]"')
    interrupt.listen()
    try:
        if what == "serve":
            from .serve import serve

            return serve()
        from .run import run

        return run(arguments.database or "redis", metrics=arguments.metrics, page=arguments.write)
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    except ServerNotFound as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
