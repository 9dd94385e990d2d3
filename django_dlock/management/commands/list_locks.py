"""``manage.py list_locks``: what is held now."""

from __future__ import annotations

from typing import Any

from ..operator import LockCommand


class Command(LockCommand):
    help = "List the locks that are held now, by whom, and for how long yet."

    def handle(self, *args: Any, **options: Any) -> None:
        survey = self.survey(options["using"])
        infos = self.find(survey, options["name"])
        nothing = "No answer." if survey.problems else "No lock is held."
        self.print_leases(infos, options["format"], nothing)
        self.tell_problems(survey)
