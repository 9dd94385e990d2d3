"""What the pages share: they are read-only, except for guarded steps."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth import get_permission_codename, get_user_model
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.core.paginator import Page, Paginator
from django.db import Error, models, router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from ..databases.errors import of_ours
from ..databases.time import local_time
from ..text.printable import printable
from .lookups import NamedLookups
from .text_columns import PrintableColumns

__all__ = [
    "CHANGE",
    "DELETION",
    "BoundedChangeList",
    "BoundedPaginator",
    "GuardedAdmin",
    "ReadOnlyAdmin",
    "badge",
    "breakable",
    "lines",
    "local_text",
    "log",
    "long_text",
    "may_see_users",
    "remember",
    "request_of",
    "time_of",
]

_PARTS = re.compile(r"[^._:/]+[._:/]*|[._:/]+")


class ReadOnlyAdmin(PrintableColumns, NamedLookups):
    """A model that cannot be added, changed or deleted with the admin's own forms.

    Attributes:
        optional_fields: A field of the page of one object → the attribute without whose value the
            field would say nothing, and is left out.
    """

    optional_fields: Mapping[str, str] = {}
    actions: Sequence[Any] | None = None

    class Media:
        css = {
            "all": tuple(f"django_dlock/{name}.css" for name in ("admin", "cards", "themes")),
        }

    def database(self, request: HttpRequest) -> str:
        """The one whose rows the pages show."""
        return router.db_for_read(self.model)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        # Replaces Django's own title, "Select … to view".
        title = capfirst(self.opts.verbose_name_plural)
        try:
            return super().changelist_view(request, {"title": title, **(extra_context or {})})
        except Error as error:
            return self._say_what_to_run(request, error)

    def changeform_view(self, request: HttpRequest, *args: Any, **options: Any) -> Any:
        try:
            return super().changeform_view(request, *args, **options)
        except Error as error:
            return self._say_what_to_run(request, error)

    def _say_what_to_run(self, request: HttpRequest, error: Error) -> HttpResponseRedirect:
        """To a page without our tables, if they are missing; else the error is raised."""
        using = self.database(request)
        told = of_ours(error, using)
        if told is error:
            raise error
        self.message_user(request, str(told), messages.ERROR)
        if using != router.db_for_read(self.model):
            return HttpResponseRedirect(request.path)
        return HttpResponseRedirect(reverse("admin:index", current_app=self.admin_site.name))

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields: Sequence[Any] = super().get_fields(request, obj)
        optional = {} if obj is None else self.optional_fields
        return [it for it in fields if it not in optional or getattr(obj, optional[it])]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class GuardedAdmin(ReadOnlyAdmin):
    """Objects with steps that an operator has to confirm, each on a separate page.

    Attributes:
        steps: Their names in the permissions, in the URLs and in the names of the templates.
    """

    steps: tuple[str, ...]

    def may_take_step(self, request: HttpRequest, step: str) -> bool:
        """Whether the user has the permission for the step, and may see the objects."""
        permission = f"django_dlock.{get_permission_codename(step, self.opts)}"
        return self.has_view_permission(request) and request.user.has_perm(permission)

    def get_urls(self) -> list[URLPattern]:
        steps = [
            path(
                f"<path:object_id>/{step}/",
                self.admin_site.admin_view(self.step_view),
                {"step": step},
                name=f"django_dlock_{self.opts.model_name}_{step}",
            )
            for step in self.steps
        ]
        return [*steps, *super().get_urls()]

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        allowed = {step for step in self.steps if self.may_take_step(request, step)}
        context = {"allowed_steps": allowed, **(extra_context or {})}
        return super().changeform_view(request, object_id, form_url, context)

    def step_view(self, request: HttpRequest, object_id: str, step: str) -> HttpResponseBase:
        """Ask for confirmation, then take the step, if nothing has changed meanwhile."""
        if not self.may_take_step(request, step):
            raise PermissionDenied
        return self.confirm_view(request, unquote(object_id), step)

    def confirm_view(self, request: HttpRequest, object_id: str, step: str) -> HttpResponseBase:
        """Show the confirmation page; if it was confirmed, take the step."""
        raise NotImplementedError

    def confirmation(
        self, request: HttpRequest, obj: Any, step: str, **facts: Any
    ) -> TemplateResponse:
        """The confirmation page; ``obj`` is ``None`` if it is about several objects."""
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "object": obj,
            "preserved_filters": self.get_preserved_filters(request),
            "media": self.media,
            **facts,
        }
        request.current_app = self.admin_site.name
        # For instance heldlock/release.html, or idempotencyrecord/forget.html.
        template = f"admin/django_dlock/{self.opts.model_name}/{step}.html"
        return TemplateResponse(request, template, context)

    def _get_obj_does_not_exist_redirect(
        self, request: HttpRequest, opts: Any, object_id: str
    ) -> HttpResponseRedirect:
        return self.to_list(request)

    def to_list(self, request: HttpRequest) -> HttpResponseRedirect:
        name = f"admin:django_dlock_{self.opts.model_name}_changelist"
        url = reverse(name, current_app=self.admin_site.name)
        filters: dict[str, Any] = {
            "opts": self.opts,
            "preserved_filters": self.get_preserved_filters(request),
        }
        return HttpResponseRedirect(add_preserved_filters(filters, url))


class BoundedPaginator(Paginator):  # type: ignore[type-arg] # as ReadOnlyAdmin
    """Pages of the first rows of a table that may have millions.

    Attributes:
        MAX_ROWS: How many rows can be paged through; further rows are not counted.
        is_cut: Whether there are further rows.
    """

    MAX_ROWS = 10_000
    object_list: models.QuerySet[Any]

    @functools.cached_property
    def _keys(self) -> list[Any]:
        # Cached, because even a query that finds nothing may read the whole table.
        return list(self.object_list.values_list("pk", flat=True)[: self.MAX_ROWS + 1])

    @functools.cached_property
    def count(self) -> int:
        return min(len(self._keys), self.MAX_ROWS)

    @property
    def is_cut(self) -> bool:
        return len(self._keys) > self.MAX_ROWS

    def page(self, number: int | str) -> Any:
        number = self.validate_number(number)
        first = (number - 1) * self.per_page
        keys = self._keys[first : min(first + self.per_page, self.count)]
        return Page(self.object_list.filter(pk__in=keys), number, self)


class BoundedChangeList(ChangeList):
    """A list whose pages are those of a ``BoundedPaginator``."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if not (self.query or self.has_active_filters):
            # Without this, Django would offer "Show all" although nothing is left out.
            self.full_result_count = self.result_count
        if not self.multi_page:
            # Without this, Django would search the table a second time.
            self.result_list = self.paginator.page(1).object_list


def may_see_users(request: HttpRequest) -> bool:
    """Whether the visitor may see the user names of requests and releases."""
    user = get_user_model()._meta
    return request.user.has_perm(f"{user.app_label}.{get_permission_codename('view', user)}")


def badge(style: str, text: Any) -> SafeString:
    """A word on a coloured background; ``style`` is the name of the colour in ``admin.css``."""
    shown = printable(str(text))
    return format_html('<span class="dlock-badge dlock-{}">{}</span>', style, shown)


def breakable(text: str) -> SafeString:
    """Let a narrow column wrap ``text`` after a dot, a slash, a colon or an underscore.

    The text has its own direction, so that text from right to left does not reorder the text
    beside it. Characters that are not visible by themselves are escaped.
    """
    parts = ((part,) for part in _PARTS.findall(printable(text)))
    return format_html("<bdi>{}</bdi>", format_html_join(SafeString("<wbr>"), "{}", parts))


def lines(*texts: str) -> SafeString:
    """The lines of one cell, as text or HTML; the style sheet limits their width."""
    shown = ((text if isinstance(text, SafeString) else breakable(text),) for text in texts)
    # In one element, because a theme may put the parts of a cell side by side.
    parts = format_html_join("", "<div>{}</div>", shown)
    return format_html('<div class="dlock-lines">{}</div>', parts)


def long_text(text: str) -> SafeString:
    """Text of many lines, in a frame that scrolls."""
    shown = printable(text, keep="\n")
    return format_html('<pre class="dlock-facts dlock-long">{}</pre>', shown)


_REQUEST = "_dlock_request"


def remember(obj: Any, request: HttpRequest) -> None:
    """Keep the request with the object of a page: Django does not pass it to a field."""
    vars(obj)[_REQUEST] = request


def request_of(obj: Any) -> HttpRequest | None:
    """The request for whose page ``obj`` was read; ``None`` if it is not on a page of its own."""
    found: HttpRequest | None = vars(obj).get(_REQUEST)
    return found


def local_text(when: datetime) -> str:
    """A time in the visitor's time zone, to the second."""
    try:
        when = local_time(when)
    except OverflowError:
        # A row that somebody else has written: there it would be before the year 1, or after 9999.
        pass
    # Not ``strftime``, which writes years before 1000 with fewer digits.
    return when.replace(tzinfo=None).isoformat(" ", "seconds")


def time_of(field: str, description: Any) -> Any:
    """A column of a time with seconds, which Django's own format leaves out."""

    @admin.display(description=description, ordering=field)
    def column(self: Any, obj: models.Model) -> str:
        when: datetime | None = getattr(obj, field)
        # Not ``None``, which the page of one object shows as "None".
        if when is None:
            return str(self.get_empty_value_display())
        parts = ((part,) for part in local_text(when).split())
        return format_html_join(" ", '<span class="dlock-time">{}</span>', parts)

    return column


@contextlib.contextmanager
def atomic_in(*databases: str | None) -> Iterator[None]:
    """A transaction in each of these databases; that of the first one is committed last."""
    with contextlib.ExitStack() as transactions:
        for database in dict.fromkeys(databases):
            transactions.enter_context(transaction.atomic(using=database))
        yield


def log(request: HttpRequest, obj: models.Model, flag: int, message: str) -> None:
    """Write the admin's log entry about ``obj``, which may have no table."""
    # The user is never anonymous, because all views of the admin require staff.
    user_id: Any = request.user.pk
    LogEntry.objects.create(
        user_id=user_id,
        content_type=ContentType.objects.get_for_model(obj),
        object_id=str(obj.pk),
        object_repr=str(obj)[:200],
        action_flag=flag,
        change_message=message,
    )
