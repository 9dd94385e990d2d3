"""The smallest site that runs: settings for the tests, the demonstration and the screenshots."""

from .celery import app as celery_app

__all__ = ["celery_app"]
