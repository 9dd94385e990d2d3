"""``python -m testproject.demo [serve]``."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType
from typing import NoReturn

from testproject.servers import ServerNotFound


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testproject.demo", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["run", "serve"], default="run")
    what = parser.parse_args().what
    # However it is ended, it takes with it what it started. SIGINT, too: what a shell starts in
    # the background ignores it otherwise.
    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        signal.signal(getattr(signal, name), _interrupt)
    try:
        if what == "serve":
            from .serve import serve

            return serve()
        from .run import run

        return run()
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    except ServerNotFound as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
