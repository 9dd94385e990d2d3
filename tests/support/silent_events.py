"""Settings of a command whose lock events are in the PostgreSQL that ``EVENTS_URL`` names."""

from __future__ import annotations

import os

from testproject.settings import *  # noqa: F403
from tests.support.postgres import settings_for

DATABASES = {"default": settings_for(os.environ["EVENTS_URL"])}
