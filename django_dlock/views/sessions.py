"""The session of a request that has waited for another one, which may have written to it."""

from __future__ import annotations

from django.contrib.sessions.backends.base import SessionBase
from django.http import HttpRequest

from .wrapped import unwrapped


def read_again(request: HttpRequest) -> None:
    """Let the session be read anew, unless this request has changed it.

    It was read with the user, before the first request ended. With ``SESSION_SAVE_EVERY_REQUEST``,
    it would be saved as it was then, without what the first request has written.
    """
    whole = unwrapped(request)
    old = getattr(whole, "session", None)
    if isinstance(old, SessionBase) and old.session_key and not old.modified:
        whole.session = type(old)(old.session_key)
        # The middleware sets Vary by this.
        whole.session.accessed = old.accessed
