"""``LockedObjectAdmin``: the locks of an object on its page in the project's own admin."""

from __future__ import annotations

import functools
import inspect
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import flatten_fieldsets, quote, unquote
from django.core import checks
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase, HttpResponseRedirect, QueryDict
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .. import conf, tenancy
from ..keys import Key, MissingValue, compile_key
from ..log import logger
from ..models import HeldLock
from ..operators.inspection import AliasQuery
from .base import remember, request_of
from .cells import holder_of
from .changelist import alias_and_name, as_row
from .held_locks import HeldLockAdmin

PANEL = "object_locks"
"""The read-only field that shows the locks."""

_CALL = inspect.Signature([inspect.Parameter("object", inspect.Parameter.POSITIONAL_OR_KEYWORD)])
_ATTRIBUTE = re.compile(r"object(?:\.(\w+)|$)")

LockKey = str | Callable[[Any], str]


class LockedObjectAdmin(admin.ModelAdmin):  # type: ignore[type-arg] # no generic at run time
    """A base class for a ``ModelAdmin`` of yours: the page of an object shows its locks.

    Users with the permissions ``view_heldlock`` and ``release_heldlock`` can release them, with
    the rules of the page of held locks; others only see them. Name it before other base classes.

    Attributes:
        lock_keys: Templates over ``object``, such as ``"order:{object.pk}"``, or functions that
            take the object and return the name of a lock. A key without a value is left out.
        lock_using: The alias whose locks are shown, or several.
    """

    lock_keys: Sequence[LockKey] = ()
    lock_using: str | Sequence[str] = "default"

    class Media:
        css = {"all": ("django_dlock/admin.css", "django_dlock/themes.css")}

    # -- checks ------------------------------------------------------------------------

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        return [*super().check(**kwargs), *self._check_keys(), *self._check_aliases()]

    def _check_keys(self) -> Iterator[checks.CheckMessage]:
        for problem, hint in self._wrong_keys():
            yield checks.Error(problem, hint=hint, obj=type(self), id="django_dlock.E201")
        for template, attribute in self._fields_of_keys():
            if attribute and not hasattr(self.model, attribute):
                yield checks.Warning(
                    f"lock_keys: the template {template!r} names {attribute!r}, which "
                    f"{self.model.__name__} does not have.",
                    hint="Correct the name. Objects without the attribute have no such lock.",
                    obj=type(self),
                    id="django_dlock.W201",
                )

    def _wrong_keys(self) -> Iterator[tuple[str, str | None]]:
        """What is wrong with each key, and a hint."""
        example = "For instance: lock_keys = ('order:{object.pk}',)"
        if isinstance(self.lock_keys, str) or not isinstance(self.lock_keys, list | tuple):
            yield f"lock_keys is {self.lock_keys!r}; it takes a list or tuple.", example
        elif not self.lock_keys:
            yield "lock_keys is empty, so the page shows no locks.", example
        else:
            yield from (
                (problem, None) for problem in map(self._problem_of, self.lock_keys) if problem
            )
        for template, attribute in self._fields_of_keys():
            if not attribute:
                text = f"lock_keys: the field {{object}} of {template!r} is a whole object."
                yield text, "Name an attribute of it, such as {object.pk}."

    def _problem_of(self, key: LockKey) -> str:
        try:
            self._compile(key)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    def _fields_of_keys(self) -> Iterator[tuple[str, str]]:
        """Each template that is not wrong, with each attribute of the object that it names."""
        keys = self.lock_keys if isinstance(self.lock_keys, list | tuple) else ()
        for key in keys:
            if not isinstance(key, str) or self._problem_of(key):
                continue
            for _literal, field, _spec, _conversion in string.Formatter().parse(key):
                if field is not None and (found := _ATTRIBUTE.match(field)):
                    yield key, found[1] or ""

    def _check_aliases(self) -> Iterator[checks.CheckMessage]:
        # Other checks report wrong settings.
        known = () if conf.problems() else tuple(conf.aliases())
        for alias in self._aliases() if known else ():
            if alias not in known:
                yield checks.Error(
                    f"lock_using names {alias!r}, which DLOCKS does not define; it defines "
                    f"{', '.join(map(repr, known))}.",
                    obj=type(self),
                    id="django_dlock.E202",
                )

    # -- which locks -------------------------------------------------------------------

    def _aliases(self) -> tuple[str, ...]:
        using = (self.lock_using,) if isinstance(self.lock_using, str) else self.lock_using
        return tuple(dict.fromkeys(using))

    def _compile(self, key: LockKey) -> Key:
        what = f"lock_keys of {type(self).__name__}"
        if not isinstance(key, str) and not callable(key):
            raise TypeError(
                f"{what} contains {key!r}; it takes templates such as 'order:{{object.pk}}', and "
                "functions of the object"
            )
        return compile_key(key, _CALL, what=what)

    @functools.cached_property
    def _keys(self) -> list[Key]:
        return [self._compile(key) for key in self.lock_keys]

    def _names_of(self, obj: Any) -> tuple[list[str], list[str]]:
        """The names of the object's locks, and the problems of keys that gave none."""
        problems: list[str] = []
        names = [self._name_of(obj, key, problems) for key in self._keys]
        return [name for name in dict.fromkeys(names) if name], problems

    def _name_of(self, obj: Any, key: Key, problems: list[str]) -> str:
        """The name that a key gives; empty if it gives none."""
        try:
            return tenancy.full(key((obj,), {}))
        except MissingValue:
            # For instance the order of an invoice that has none.
            return ""
        except Exception as error:
            # Whatever a function of the project raises, the page can be used without it.
            logger.exception("A key of %s failed", type(self).__name__)
            problems.append(str(error) or repr(error))
            return ""

    def _held(self, request: HttpRequest, obj: Any) -> tuple[list[HeldLock], list[str]]:
        """The object's locks that are held now, and why others may be missing."""
        names, problems = self._names_of(obj)
        query = AliasQuery(self._aliases() if names else ())
        found = query.ask(lambda backend: [backend.get(name) for name in names])
        held = [as_row(info, request) for infos in found.values() for info in infos if info]
        return held, [*problems, *query.problems.values()]

    # -- the page of an object -----------------------------------------------------------

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        found = super().get_object(request, object_id, from_field)
        if found is not None:
            remember(found, request)
        return found

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[Any, ...]:
        return (*super().get_readonly_fields(request, obj), PANEL)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_fields(request, obj)
        # Django lists all read-only fields, unless the project names the fields itself.
        return fields if self.fields else [field for field in fields if field != PANEL]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        sets = list(super().get_fieldsets(request, obj))
        if obj is None or PANEL in flatten_fieldsets(sets):
            return sets
        return [*sets, (_("Locks"), {"fields": (PANEL,)})]

    @admin.display(description=_("held now"))
    def object_locks(self, obj: Any) -> str:
        """The locks of the object that are held now, with links to release them."""
        request = request_of(obj)
        if request is None or obj.pk is None:
            return str(self.get_empty_value_display())
        page = _ObjectLocks(self, obj)
        held, problems = self._held(request, obj)
        return SafeString(
            render_to_string(
                "admin/django_dlock/lockedobject/panel.html",
                {
                    "rows": [page.row(lock, request) for lock in held],
                    "problems": problems,
                    "several_aliases": len(self._aliases()) > 1,
                    "release_url": page.url("release_locks") if page.may_release(request) else "",
                },
            )
        )

    # -- the release ---------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        release = path(
            "<path:object_id>/locks/release/",
            self.admin_site.admin_view(self.release_locks_view),
            name=f"{self.opts.app_label}_{self.opts.model_name}_release_locks",
        )
        return [release, *super().get_urls()]

    def release_locks_view(self, request: HttpRequest, object_id: str) -> HttpResponseBase:
        """Ask for confirmation, then release the chosen locks of an object, or all of them."""
        obj = self.get_object(request, unquote(object_id))
        # Before it is said whether there is such an object, as Django does.
        if not self.has_view_or_change_permission(request, obj):
            raise PermissionDenied
        if obj is None:
            # A private method of Django, so that the message is the one of Django's own pages.
            missing: HttpResponseBase = super()._get_obj_does_not_exist_redirect(  # type: ignore[misc]
                request, self.opts, object_id
            )
            return missing
        page = _ObjectLocks(self, obj)
        if not page.may_release(request):
            raise PermissionDenied
        chosen = request.POST.getlist(ACTION_CHECKBOX_NAME) or request.GET.getlist("lock")
        if not chosen:
            held, problems = self._held(request, obj)
            for problem in problems:
                self.message_user(request, problem, messages.ERROR)
            if not held and not problems:
                text = gettext("No lock of this object is held any more.")
                self.message_user(request, text, messages.WARNING)
            return page.release(request, [lock.pk for lock in held])
        names, _problems = self._names_of(obj)
        aliases = self._aliases()
        if not all(a in aliases and n in names for a, n in map(alias_and_name, chosen)):
            text = gettext("This object has changed since the page was loaded. Nothing was done.")
            self.message_user(request, text, messages.WARNING)
            return page.to_list(request)
        return page.release(request, chosen)


class _ObjectLocks(HeldLockAdmin):
    """The page of held locks, as far as it concerns one object; it is not registered."""

    def __init__(self, page: LockedObjectAdmin, obj: Any) -> None:
        super().__init__(HeldLock, page.admin_site)
        self.page, self.obj = page, obj

    def may_release(self, request: HttpRequest) -> bool:
        return self.may_take_step(request, "release")

    def release(self, request: HttpRequest, object_ids: list[str]) -> HttpResponseBase:
        """Release the confirmed locks, and show a confirmation page for the others."""
        return self._release_all(request, object_ids)

    def url(self, name: str) -> str:
        opts = self.page.opts
        return reverse(
            f"admin:{opts.app_label}_{opts.model_name}_{name}",
            args=[quote(self.obj.pk)],
            current_app=self.admin_site.name,
        )

    def row(self, lock: HeldLock, request: HttpRequest) -> dict[str, Any]:
        """What the panel shows of a lock."""
        query = QueryDict(mutable=True)
        query["lock"] = lock.pk
        url = ""
        if self.admin_site.is_registered(HeldLock) and self.has_view_permission(request):
            name = "admin:django_dlock_heldlock_change"
            url = reverse(name, args=[quote(lock.pk)], current_app=self.admin_site.name)
        return {
            "info": lock.info,
            "shown_name": lock.shown_name,
            "name": self.lock_name(lock),
            "url": url,
            "query": query.urlencode(),
            "state": self.holder_state(lock),
            "holder": holder_of(lock.info),
            "age": self.age(lock),
            "ttl": self.ttl(lock),
            "waiting": self.waiting(lock),
            "kind": self.kind(lock),
        }

    def to_list(self, request: HttpRequest) -> HttpResponseRedirect:
        return HttpResponseRedirect(self.url("change"))

    def confirmation(
        self, request: HttpRequest, obj: Any, step: str, **facts: Any
    ) -> TemplateResponse:
        page = super().confirmation(request, obj, step, **facts)
        page.template_name = "admin/django_dlock/lockedobject/release.html"
        page.context_data = {
            **(page.context_data or {}),
            "back_url": self.url("change"),
            "locked_object": self.obj,
            # For the breadcrumbs, which some themes build from the model.
            "opts": self.page.opts,
        }
        return page
