"""A site whose admin has one theme and shows prepared locks.

Its clock stands still, so that locks neither expire nor look different in each picture. Every
visitor is logged in as the operator, so that no page of a login comes between.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from django.http import HttpRequest, HttpResponseBase

from django_dlock.testing.clock import FakeClock
from testproject.processes import HOST, OwnProcess

THEMES = {
    "stock": [],
    "unfold": ["unfold"],
    "jazzmin": ["jazzmin"],
    "grappelli": ["grappelli"],
}
DOWN = {
    "BACKEND": "django_dlock.backends.redis.RedisBackend",
    "LOCATION": "redis://127.0.0.1:1/0",
}
NAME = "tests.support.themed_site"
_turn = threading.Lock()


class ThemedSite(OwnProcess):
    """The site in a separate process, because apps can be installed only before Django starts.

    Args:
        theme: One of ``THEMES``.
        database: A file that sites share; the first one fills it, which takes longer than the
            rest of a start.
    """

    START_TIMEOUT = 60.0

    def __init__(self, theme: str, database: Path) -> None:
        super().__init__("dlock-theme-")
        self.theme = theme
        self._database = database
        self.url = ""

    def _launch(self) -> None:
        self.url = f"http://{HOST}:{self.port}"
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
        environment["DLOCK_DB"] = str(self._database)
        command = [sys.executable, "-m", NAME, str(self.port), self.theme, str(self.directory)]
        self._spawn(command, environment)

    def _answers(self) -> bool:
        # Something else may listen there.
        with (
            contextlib.suppress(OSError, HTTPException),
            contextlib.closing(HTTPConnection(HOST, self.port, timeout=20)) as asking,
        ):
            # A page that needs no user, and reads no lock.
            asking.request("GET", "/admin/jsi18n/")
            return asking.getresponse().status == 200
        return False


def as_operator(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Middleware: log every visitor in."""
    from django.contrib.auth.models import User

    def middleware(request: HttpRequest) -> HttpResponseBase:
        request.user = User.objects.get(username="operator")
        return get_response(request)

    return middleware


def as_cookies_say(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Middleware: what the cookies change.

    With ``outage``, there is another alias, which does not answer; with ``off``, nothing is counted
    for the lock statistics.
    """
    from django.conf import settings

    def middleware(request: HttpRequest) -> HttpResponseBase:
        # The settings are those of all threads.
        with _turn:
            settings.DLOCKS.pop("billing", None)
            if "outage" in request.COOKIES:
                settings.DLOCKS["billing"] = DOWN
            exporters = [] if "off" in request.COOKIES else ["admin"]
            settings.DLOCK_METRICS = {"EXPORTERS": exporters}
            return get_response(request)

    return middleware


def serve(port: str, theme: str, directory: str) -> None:
    import django
    from django.conf import settings
    from django.core.management import call_command

    sys.stdout = sys.stderr = (Path(directory) / "log").open("a", buffering=1)
    settings.INSTALLED_APPS = [*THEMES[theme], *settings.INSTALLED_APPS]
    # Follow the system's colours, as the other two themes do by default; load nothing remote.
    settings.JAZZMIN_UI_TWEAKS = {"default_theme_mode": "auto"}
    settings.JAZZMIN_SETTINGS = {"use_google_fonts_cdn": False}
    settings.DLOCKS = {"default": {"BACKEND": "tests.support.posed.PictureBackend"}}
    settings.DLOCK_METRICS = {"EXPORTERS": ["admin"]}
    # The operator has a password, so that the page's head is complete; nobody checks it.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.MIDDLEWARE += [f"{NAME}.as_operator", f"{NAME}.as_cookies_say"]
    if theme == "grappelli":
        settings.ROOT_URLCONF = "tests.support.themed_urls"
    settings.DLOCK_ADMIN = {"TASK_URL": "https://flower.example.com/task/{task_id}"}
    if theme != "stock":
        # Their pages contain inline scripts and styles.
        settings.MIDDLEWARE.remove("testproject.middleware.content_security_policy")
    is_first = not Path(settings.DATABASES["default"]["NAME"]).exists()
    django.setup()

    from tests.support import posed, posed_statistics

    register_orders(theme)
    if is_first:
        fill_the_database()
    posed_statistics.stop_the_clock()
    with FakeClock():
        posed.pose_locks()
        call_command("runserver", f"{HOST}:{port}", use_reloader=False, insecure_serving=True)


def fill_the_database() -> None:
    from django.contrib.auth.models import User
    from django.core.management import call_command

    from tests.support import posed, posed_statistics

    call_command("migrate", verbosity=0)
    User.objects.create_superuser("operator", password="operator")
    posed.pose_records()
    posed.pose_events()
    posed.pose_orders()
    posed_statistics.pose_statistics()


def register_orders(theme: str) -> None:
    """Give orders a page with several locks, made with the theme's own class."""
    from django.contrib import admin

    from django_dlock.admin import LockedObjectAdmin
    from testproject.shop.models import Order

    bases: tuple[type, ...] = (LockedObjectAdmin,)
    if theme == "unfold":
        import unfold.admin

        bases = (LockedObjectAdmin, unfold.admin.ModelAdmin)
    keys = ("order:{object.number}", "invoice:2281", "stock:7")
    admin.site.unregister(Order)
    admin.site.register(
        Order, type("OrderAdmin", bases, {"lock_keys": keys, "__module__": __name__})
    )


if __name__ == "__main__":
    serve(*sys.argv[1:])
