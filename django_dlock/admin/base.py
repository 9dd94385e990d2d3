"""What the three pages share: they are read-only but for one guarded step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from django.contrib import admin
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst

__all__ = ["CHANGE", "DELETION", "ReadOnlyAdmin", "badge", "log", "may_see_users"]

M = TypeVar("M", bound=models.Model)

if TYPE_CHECKING:
    # Generic for the type checker only; at run time ``ModelAdmin`` takes no parameter.
    class _ModelAdmin(admin.ModelAdmin[M]):
        pass
else:

    class _ModelAdmin(admin.ModelAdmin):
        def __class_getitem__(cls, item: Any) -> Any:
            return cls


class ReadOnlyAdmin(_ModelAdmin[M]):
    """A model that nobody adds, changes or deletes through the admin's own forms."""

    actions = None

    class Media:
        css = {"all": ("django_dlock/admin.css",)}

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        # Django's own title asks to select one, as if that were all there is to do.
        title = capfirst(self.opts.verbose_name_plural)
        return super().changelist_view(request, {"title": title, **(extra_context or {})})

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: M | None = None) -> bool:
        return False


def may_see_users(request: HttpRequest) -> bool:
    """Whether the visitor may see who is behind a request or a release."""
    return request.user.has_perm("auth.view_user")


def badge(look: str, text: Any) -> SafeString:
    """A word on a coloured ground; ``look`` names the colour in ``admin.css``."""
    return format_html('<span class="dlock-badge dlock-{}">{}</span>', look, text)


def log(request: HttpRequest, obj: models.Model, flag: int, message: str) -> None:
    """Write the admin's log entry about ``obj``, whose table may not exist."""
    # Never anonymous: every view of the admin asks for staff first.
    user_id: Any = request.user.pk
    LogEntry.objects.create(
        user_id=user_id,
        content_type=ContentType.objects.get_for_model(obj),
        object_id=str(obj.pk),
        object_repr=str(obj)[:200],
        action_flag=flag,
        change_message=message,
    )
