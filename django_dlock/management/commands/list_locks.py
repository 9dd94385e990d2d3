"""``manage.py list_locks``: list the locks that are held now."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from ...backends.base import BaseLockBackend
from ...inspection import AliasQuery
from ...lease import LeaseInfo, Waiter
from ..base import LockCommand, as_errors
from ..output import encoding_of, error_of
from ..screen import Screen
from ..wanted import Wanted
from ..watch import Watch, clock_time

SHORTEST, USUAL = 0.1, 2.0
"""Seconds of ``--watch``."""
WAITERS = 100
"""Waiters of each lock that ``--waiters`` lists."""


class Command(LockCommand):
    help = "List the locks that are held now, by whom, and how long each lease has left."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--watch",
            nargs="?",
            type=float,
            const=USUAL,
            metavar="SECONDS",
            help=f"List them again and again until Ctrl-C (default: every {USUAL:g} s).",
        )
        parser.add_argument(
            "--older-than", type=float, metavar="SECONDS", help="Only locks held for this long."
        )
        parser.add_argument(
            "--waiters",
            action="store_true",
            help=f"Also list who waits for each lock, at most the first {WAITERS} of each.",
        )
        super().add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        alias_query = self.alias_query(options["using"])
        self.not_negative("--older-than", options["older_than"])
        interval = options["watch"]
        wanted = Wanted(
            options["name"], options["host"], options["task"], options["older_than"] or 0.0
        )
        if interval is not None:
            if options["waiters"]:
                self.wrong_usage("--waiters lists them once; leave out --watch.")
            if not SHORTEST <= interval <= 86_400:
                self.wrong_usage(f"--watch is {interval:g}; it takes {SHORTEST:g} to 86400 s.")
            self._watch(alias_query.aliases, wanted, interval, options["format"])
            return
        infos = self.find(alias_query, wanted)
        nothing = "No answer." if alias_query.problems else wanted.nothing()
        if options["waiters"]:
            self._print_with_waiters(alias_query, infos, options["format"], nothing)
        else:
            self.print_leases(infos, options["format"], nothing, as_errors(alias_query.problems))
        self.fail_on_problems(alias_query)

    def _print_with_waiters(
        self, alias_query: AliasQuery, infos: list[LeaseInfo], output_format: str, nothing: str
    ) -> None:
        found: dict[tuple[str, str], list[Waiter]] = {}

        def read(backend: BaseLockBackend) -> None:
            for info in infos:
                if info.alias == backend.alias and info.waiting:
                    found[info.alias, info.name] = backend.waiters(info.name, limit=WAITERS)

        alias_query.ask(read)
        untold = {info.alias: None for info in infos if "waiting" in info.unknown}
        for alias in untold:
            self.stderr.write(f"Alias {alias!r} does not know who waits for its locks.")
        if output_format == "json":
            waiters = (found.get((info.alias, info.name), []) for info in infos)
            listed = [
                {**info.as_dict(), "waiters": [waiter.as_dict() for waiter in those]}
                for info, those in zip(infos, waiters, strict=True)
            ]
            self.print_json([*listed, *as_errors(alias_query.problems)])
            return
        self.print_leases(infos, output_format, nothing)
        self.print_waiters([waiter for those in found.values() for waiter in those])

    def _watch(
        self, aliases: list[str], wanted: Wanted, interval: float, output_format: str
    ) -> None:
        drawn = output_format == "text" and self.stdout.isatty()

        def ask(query: AliasQuery) -> tuple[list[LeaseInfo], int]:
            if drawn:
                # A terminal shows no more.
                return self.find_first(query, wanted, Screen.size()[1])
            infos = self.find(query, wanted)
            return infos, len(infos)

        watch = Watch(ask, lambda: AliasQuery(aliases), interval)
        try:
            if drawn:
                self._redraw(watch, wanted.nothing())
            else:
                self._print_each(watch, wanted.nothing(), output_format)
        except KeyboardInterrupt:
            # This is how a watch ends.
            pass

    def _redraw(self, watch: Watch, nothing: str) -> None:
        with Screen(self.stdout) as screen:
            for answer in watch.answers():
                watch.note_outages(answer)
                encoding = encoding_of(self.stdout)
                screen.draw(watch.page(answer, nothing, screen.size(), encoding))
                if error_of(self.stdout) is not None:
                    return

    def _print_each(self, watch: Watch, nothing: str, output_format: str) -> None:
        for answer in watch.answers():
            for change in watch.note_outages(answer):
                self.stderr.write(f"{clock_time()} {change}")
            if output_format == "json":
                listed = [info.as_dict() for info in answer.infos]
                self.print_json([*listed, *as_errors(answer.problems)], indent=None)
            else:
                page = watch.page(answer, nothing, None, encoding_of(self.stdout))
                self.stdout.write("\n".join([*page, ""]))
            self.stdout.flush()
            if error_of(self.stdout) is not None:
                # As with ``| head``.
                return
