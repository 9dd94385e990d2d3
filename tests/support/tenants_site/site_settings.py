"""Settings of the project, and those that the page adds."""

from __future__ import annotations

import os

# The page's own: DLOCK_SCOPE, SHARED_APPS and TENANT_APPS.
from page_settings import *  # noqa: F403
from page_settings import SHARED_APPS, TENANT_APPS

from testproject.postgres import settings_for

SECRET_KEY = "only for tests"
USE_TZ = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "site_urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = list(dict.fromkeys([*SHARED_APPS, *TENANT_APPS]))
MIDDLEWARE = ["django_tenants.middleware.main.TenantMainMiddleware"]
TENANT_MODEL, TENANT_DOMAIN_MODEL = "customers.Client", "customers.Domain"
DATABASES = {
    "default": {
        **settings_for(os.environ["TENANTS_POSTGRES"]),
        "ENGINE": "django_tenants.postgresql_backend",
    }
}
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
DLOCKS = {
    "default": {
        "BACKEND": "django_dlock.backends.redis.RedisBackend",
        "LOCATION": os.environ["TENANTS_REDIS"],
    },
    "database": {"BACKEND": "django_dlock.backends.database.DatabaseBackend"},
}
CELERY_BROKER_URL = CELERY_RESULT_BACKEND = os.environ["TENANTS_REDIS"]
CELERY_TASK_SERIALIZER = "json"
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
