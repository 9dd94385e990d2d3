"""The filters of the list of held locks. The backends apply them; see ``LeaseQuery``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.contrib.admin import AllValuesFieldListFilter, ListFilter, SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..exceptions import InvalidLockBackend
from ..handler import locks

KINDS = (
    ("held", _("held")),
    ("cooling", _("cooling")),
    ("parked", _("parked")),
    ("reserved", _("reserved")),
)
HOLDER_STATES = (
    ("alive", _("alive")),
    ("silent", _("silent")),
    ("dead", _("dead")),
    ("unknown", _("unknown")),
)
AGES = (
    ("60", _("1 minute or more")),
    ("600", _("10 minutes or more")),
    ("3600", _("1 hour or more")),
    ("86400", _("1 day or more")),
)
"""Seconds."""


def known_aliases() -> tuple[list[str], str]:
    """The aliases of ``DLOCKS``; or none, and the error if it is not a dict."""
    try:
        return list(locks), ""
    except InvalidLockBackend as error:
        return [], str(error)


def tells_alias(alias: str = "") -> bool:
    """Whether a page has to name this alias, or any: not if there is no other one."""
    aliases, _problem = known_aliases()
    return len(aliases) != 1 or alias not in ("", *aliases)


class StoredAliasFilter(AllValuesFieldListFilter):
    """The aliases of the rows of a table, if they have several."""

    def has_output(self) -> bool:
        return len([alias for alias in self.lookup_choices if alias]) > 1 or bool(
            self.used_parameters
        )


class LeaseFilter(ListFilter):
    """A filter for leases; it does not change the queryset."""

    def wanted(self) -> dict[str, Any]:
        """Arguments of ``LeaseQuery``; ``alias`` is the only one whose locks are shown."""
        raise NotImplementedError

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset


class _Choice(LeaseFilter, SimpleListFilter):
    """A filter by one value out of a few."""

    facts: Sequence[tuple[str, Any]]

    def wanted(self) -> dict[str, Any]:
        return {} if self.value() is None else {str(self.parameter_name): self.value()}

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, Any]]:
        return self.facts


class AliasFilter(_Choice):
    title = _("alias")
    parameter_name = "alias"

    def has_output(self) -> bool:
        # Also if an address names an alias that no longer exists.
        return len(self.lookup_choices) > 1 or self.value() is not None

    def lookups(self, request: HttpRequest, model_admin: Any) -> Sequence[tuple[str, str]]:
        return [(alias, alias) for alias in known_aliases()[0]]


class KindFilter(_Choice):
    title = _("kind")
    parameter_name = "kind"
    facts = KINDS


class HolderStateFilter(_Choice):
    title = _("state of the holder")
    parameter_name = "holder_state"
    facts = HOLDER_STATES


class WaitingFilter(_Choice):
    title = _("waiting")
    parameter_name = "waiting"
    facts = (("yes", _("somebody waits")), ("deadlock", _("in a deadlock")))

    def wanted(self) -> dict[str, Any]:
        """``deadlock`` is for the list itself, because no store knows deadlocks."""
        names = {None: "", "yes": "waiting", "deadlock": "deadlock"}
        try:
            name = names[self.value()]
        except KeyError as error:
            raise IncorrectLookupParameters(error) from error
        return {name: True} if name else {}


class AgeFilter(_Choice):
    title = _("age")
    parameter_name = "older_than"
    facts = AGES

    def wanted(self) -> dict[str, Any]:
        if self.value() is None:
            return {}
        try:
            seconds = float(str(self.value()))
        except ValueError as error:
            raise IncorrectLookupParameters(error) from error
        if not 0 <= seconds < float("inf"):
            raise IncorrectLookupParameters
        return {"older_than": seconds}


class TextFilter(LeaseFilter):
    """What the name, the host and the task begin with, in one small form."""

    title = _("name, host and task")
    template = "admin/django_dlock/heldlock/text_filter.html"
    FORM = "dlock-narrow"
    """The id of the form; the page contains it in a place that is not inside another form."""
    FIELDS = (
        ("prefix", _("Name begins with")),
        ("host", _("Host begins with")),
        ("task", _("Task begins with")),
    )

    def __init__(
        self, request: HttpRequest, params: dict[str, Any], model: Any, model_admin: Any
    ) -> None:
        super().__init__(request, params, model, model_admin)
        for name, _label in self.FIELDS:
            # An empty field of the form filters nothing.
            text = (params.pop(name, None) or [""])[-1]
            if text:
                self.used_parameters[name] = text

    def has_output(self) -> bool:
        return True

    def expected_parameters(self) -> list[str | None]:
        return [name for name, _label in self.FIELDS]

    def wanted(self) -> dict[str, Any]:
        return dict(self.used_parameters)

    def choices(self, changelist: Any) -> Iterator[Any]:
        """One for each field of the form."""
        for name, label in self.FIELDS:
            text = self.used_parameters.get(name, "")
            yield {
                "field": name,
                "label": label,
                "text": text,
                "form": self.FORM,
                # For themes that list which filters are chosen.
                "selected": bool(text),
                "query_string": changelist.get_query_string(remove=[name, PAGE_VAR]),
                "display": text or _("All"),
            }
