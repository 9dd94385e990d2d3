"""A site whose admin has one theme and shows prepared locks.

Its clock stands still, so that locks neither expire nor look different in each picture.
"""

from __future__ import annotations

import contextlib
import os
import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from django_dlock.testing.clock import FakeClock
from testproject.processes import HOST, OwnProcess

__all__ = ["PASSWORD", "THEMES", "USER", "ThemedSite"]

THEMES = {
    "stock": [],
    "unfold": ["unfold"],
    "jazzmin": ["jazzmin"],
    "grappelli": ["grappelli"],
}
USER = PASSWORD = "operator"


class ThemedSite(OwnProcess):
    """The site in a separate process, because apps can be installed only before Django starts.

    Args:
        theme: One of ``THEMES``.
        outage: Whether there is another alias, which does not answer.
    """

    START_TIMEOUT = 60.0

    def __init__(self, theme: str, *, outage: bool = False) -> None:
        super().__init__("dlock-theme-")
        self.theme = theme
        self._arguments = theme, "outage" if outage else "", str(self.directory)
        self.url = ""

    def _launch(self) -> None:
        self.url = f"http://{HOST}:{self.port}"
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
        environment["DLOCK_DB"] = str(self.directory / "db.sqlite3")
        command = [sys.executable, "-m", __name__, str(self.port), *self._arguments]
        self._spawn(command, environment)

    def _answers(self) -> bool:
        # Something else may listen there.
        with (
            contextlib.suppress(OSError, HTTPException),
            contextlib.closing(HTTPConnection(HOST, self.port, timeout=20)) as asking,
        ):
            asking.request("GET", "/admin/login/")
            return asking.getresponse().status == 200
        return False


def serve(port: str, theme: str, outage: str, directory: str) -> None:
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
    # Two sites on one host would share their cookies.
    settings.SESSION_COOKIE_NAME = f"session-{port}"
    settings.LOGIN_REDIRECT_URL = "/admin/"
    if theme == "grappelli":
        settings.ROOT_URLCONF = "tests.support.themed_urls"
    settings.DLOCK_ADMIN = {"TASK_URL": "https://flower.example.com/task/{task_id}"}
    if outage:
        settings.DLOCKS["billing"] = {
            "BACKEND": "django_dlock.backends.redis.RedisBackend",
            "LOCATION": "redis://127.0.0.1:1/0",
        }
    if theme != "stock":
        # Their pages contain inline scripts and styles.
        settings.MIDDLEWARE.remove("testproject.middleware.content_security_policy")
    django.setup()

    from django.contrib.auth.models import User

    from tests.support import posed, posed_statistics

    register_orders(theme)
    call_command("migrate", verbosity=0)
    User.objects.create_superuser(USER, password=PASSWORD)
    with FakeClock():
        posed.pose_locks()
        posed.pose_records()
        posed.pose_events()
        posed.pose_orders()
        posed_statistics.pose_statistics()
        call_command("runserver", f"{HOST}:{port}", use_reloader=False, insecure_serving=True)


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
