"""Which modules an import of the package loads; each import in a new interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

REPORT = "; import json, sys; print(json.dumps(sorted(sys.modules)))"

FOR_LOCKS = {
    "django_dlock",
    "django_dlock.backends",
    "django_dlock.backends.alias",
    "django_dlock.backends.base",
    "django_dlock.backends.calls",
    "django_dlock.backends.pauses",
    "django_dlock.backends.pending_renewal",
    "django_dlock.backends.redis",
    "django_dlock.backends.redis.config",
    "django_dlock.clock",
    "django_dlock.conf",
    "django_dlock.core",
    "django_dlock.core.acquire",
    "django_dlock.core.cleanup",
    "django_dlock.core.dispatch",
    "django_dlock.core.fallback",
    "django_dlock.core.flow",
    "django_dlock.core.lock_leases",
    "django_dlock.core.held_lease",
    "django_dlock.core.options",
    "django_dlock.core.release",
    "django_dlock.core.schedule",
    "django_dlock.core.registry",
    "django_dlock.core.tracing",
    "django_dlock.core.transactions",
    "django_dlock.core.watchdog",
    "django_dlock.decorators",
    "django_dlock.exceptions",
    "django_dlock.handler",
    "django_dlock.keys",
    "django_dlock.lease",
    "django_dlock.lease_info",
    "django_dlock.lock",
    "django_dlock.log",
    "django_dlock.names",
    "django_dlock.process",
    "django_dlock.process.death",
    "django_dlock.process.exits",
    "django_dlock.process.forks",
    "django_dlock.process.identity",
    "django_dlock.refusal_responses",
    "django_dlock.signals",
    "django_dlock.view_signatures",
    "django_dlock.views",
}
"""All modules of the package that ``Lock``, ``locked`` and ``locked_view`` need."""

OPTIONAL = {
    *("billiard", "celery", "django_redis", "kazoo", "kombu", "prometheus_client", "redis"),
    "urllib3",
}


def modules_after(statement: str) -> set[str]:
    """The names of all modules loaded after ``statement``."""
    answer = subprocess.run(
        [sys.executable, "-c", statement + REPORT], capture_output=True, text=True, check=True
    )
    return set(json.loads(answer.stdout))


def top_level(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_importing_the_package_loads_only_the_package() -> None:
    added = modules_after("import django_dlock") - modules_after("import importlib, typing")
    assert {module for module in added if module.startswith("django")} == {"django_dlock"}
    assert not top_level(added) & OPTIONAL


def test_locks_and_decorators_load_exactly_these_modules() -> None:
    loaded = modules_after("from django_dlock import Lock, locked, locked_view")
    assert {m for m in loaded if m.partition(".")[0] == "django_dlock"} == FOR_LOCKS


def test_locks_and_decorators_load_no_model_no_celery_and_no_client() -> None:
    loaded = modules_after("from django_dlock import Lock, locked, locked_view")
    assert not top_level(loaded) & OPTIONAL
    # ``django.http``, which views need, loads Django's own models package.
    assert "django.db.models" not in modules_after("from django_dlock import Lock, locked, locks")


def test_importing_starts_no_thread() -> None:
    script = (
        "from django_dlock import Lock, locked, locked_view, locks; import threading; "
        "print(threading.active_count())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "1"


def test_an_unknown_name_is_an_attribute_error() -> None:
    import django_dlock

    with pytest.raises(AttributeError, match="no attribute 'Mutex'"):
        django_dlock.Mutex  # noqa: B018 - the access is what is tested


def test_every_public_name_can_be_imported() -> None:
    import django_dlock

    assert all(getattr(django_dlock, name) is not None for name in django_dlock.__all__)
    assert set(django_dlock.__all__) <= set(dir(django_dlock))


MISSING = "import sys; sys.modules[{module!r}] = None; "
"""Makes a module seem not to be installed."""


def error_after(statement: str) -> str:
    """The last line of the traceback that ``statement`` causes."""
    answer = subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, check=False
    )
    assert answer.returncode
    return answer.stderr.strip().splitlines()[-1]


def test_a_task_without_celery_says_what_to_install() -> None:
    error = error_after(MISSING.format(module="celery") + "from django_dlock import LockedTask")
    assert error.endswith('LockedTask needs Celery: pip install "django-dlock[celery]"')


def test_a_task_before_the_models_are_loaded_says_where_to_import_it() -> None:
    statement = (
        "from django.conf import settings; settings.configure(SECRET_KEY='x'); "
        "from django_dlock import LockedTask"
    )
    assert "import it in a module of tasks or views, not in celery.py" in error_after(statement)


def test_the_zookeeper_backend_without_its_client_says_what_to_install() -> None:
    statement = (
        "from django.conf import settings; settings.configure(DLOCKS={'default': {"
        "'BACKEND': 'django_dlock.backends.zookeeper.ZooKeeperBackend', 'LOCATION': 'x'}}); "
        "from django_dlock import locks; locks['default']"
    )
    error = error_after(MISSING.format(module="kazoo") + statement)
    assert error.endswith('pip install "django-dlock[zookeeper]"')


def test_the_redis_backend_without_its_client_says_what_to_install() -> None:
    statement = (
        "from django.conf import settings; settings.configure(DLOCKS={'default': {"
        "'BACKEND': 'django_dlock.backends.redis.RedisBackend', 'LOCATION': 'redis://x/0'}}); "
        "from django_dlock import locks; locks['default']"
    )
    error = error_after(MISSING.format(module="redis") + statement)
    assert error.endswith('pip install "django-dlock[redis]"')
