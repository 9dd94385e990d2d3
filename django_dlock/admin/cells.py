"""How the pages show the facts of a lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..lease import LeaseInfo, Waiter
from ..operators.inspection import duration
from ..operators.task_url import url_of_task
from ..process import ProcessIdentity
from ..text.request_path import cut
from .base import badge, breakable, lines
from .links import task_link

_BAR = (
    # Attributes, because a strict Content-Security-Policy refuses inline styles.
    '<svg class="dlock-bar dlock-{}" viewBox="0 0 100 6" preserveAspectRatio="none" '
    'aria-hidden="true" focusable="false"><rect class="dlock-bar-all" width="100" height="6"/>'
    '<rect class="dlock-bar-left" width="{}" height="6"/></svg>'
)


def holder_of(info: LeaseInfo) -> str:
    """See ``who``."""
    return who(info.metadata, info.process)


def who(metadata: Mapping[str, Any], process: ProcessIdentity | None) -> str:
    """Process, task or request, and user, one below the other; empty if none is known."""
    texts = [f"{process.host} · {process.pid}"] if process else []
    for key in ("task_name", "task_id", "path"):
        if key in metadata:
            # A value of another program may be huge.
            text = breakable(cut(str(metadata[key])))
            address = url_of_task(metadata[key]) if key == "task_id" else None
            texts.append(task_link(address, text) if address else text)
    if metadata.get("user"):
        texts.append(gettext("user %(user)s") % {"user": cut(str(metadata["user"]))})
    return lines(*texts) if texts else ""


def with_damage(state: SafeString, it: LeaseInfo | Waiter) -> SafeString:
    """The state; beside it, whether the store has something that this package did not write."""
    if not it.damaged:
        return state
    title = gettext("Not as django-dlock writes it: %s") % ", ".join(it.damaged)
    mark = format_html('<span title="{}">{}</span>', title, badge("bad", _("damaged")))
    return format_html("{} {}", state, mark)


def with_deadlock(state: str, url: str) -> SafeString:
    """The state; ``url`` leads to the page of the deadlock that the lock is in, or is empty."""
    if url:
        link = '<a class="dlock-deadlock" href="{}" title="{}">{}</a> {}'
        state = format_html(link, url, _("Who blocks whom"), badge("bad", _("deadlock")), state)
    return format_html('<div class="dlock-state">{}</div>', state)


def known(info: LeaseInfo, fact: str) -> Any:
    """A fact of a lease; in words, that the store does not know it."""
    if fact in info.unknown:
        return format_html('<span class="dlock-quiet">{}</span>', _("not known"))
    return getattr(info, fact)


def left_text(info: LeaseInfo) -> str:
    """The time left, or how much it is at most."""
    left = duration(info.ttl or 0.0)
    return gettext("at most %s") % left if "ttl" in info.unknown else left


def _style_of(info: LeaseInfo) -> str:
    if info.holder_state == "dead":
        return "bad"
    return "warn" if info.is_late or info.holder_state == "silent" else "good"


def time_left(info: LeaseInfo) -> SafeString:
    """The time left as text and, if the whole TTL is known, as a bar.

    A renewal that is late is named, with the time since the last one.
    """
    if info.ttl is None:
        return badge("bad", _("never ends"))
    if "ttl" in info.unknown:
        # Without a bar: its holder may renew it unseen.
        return format_html("<span>{}</span>", left_text(info))
    left, whole, bar = duration(info.ttl), info.granted_ttl, ""
    if whole:
        share = min(1.0, max(0.0, info.ttl / whole))
        bar = format_html(_BAR, _style_of(info), f"{100 * share:.1f}")
    return format_html('<div class="dlock-left">{}{}{}</div>', left, bar, _late_mark(info))


def _late_mark(info: LeaseInfo) -> SafeString:
    if not info.is_late:
        return SafeString()
    ago = gettext("last renewed %s ago") % duration(info.renewed_ago or 0.0)
    return format_html('<span title="{}">{}</span>', ago, badge("warn", _("renewal late")))


def with_late_renewal(state: str, info: LeaseInfo) -> SafeString:
    """The state; beside it, that a renewal is late, or that the lease never ends."""
    mark = badge("bad", _("never ends")) if info.ttl is None else _late_mark(info)
    return format_html("{} {}", state, mark)
