"""Which modules an import of the package loads; each import in a new interpreter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "django_dlock"

REPORT = "; import json, sys; print(json.dumps(sorted(sys.modules)))"

FOR_OTHERS = {
    *("admin", "apps", "audit", "celery", "checks", "management", "metrics", "migrations"),
    *("models", "operators", "records", "retention", "testing"),
    *(
        "blocking",
        "claims",
        "fencing",
        "fields",
        "findings",
        "idempotency",
        "idempotent",
        "inspection",
    ),
    *("inspection", "stored", "task_url"),
}
"""Words in the names of modules that ``Lock``, ``locked`` and ``locked_view`` do not need: they
are for tasks, records, models, operators and tests."""

MOST_LINES = 9800
"""Lines of the package that ``Lock``, ``locked`` and ``locked_view`` may load, whatever the files
in which they are. Raise it for something that every lock needs; load everything else later."""

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


def for_locks() -> dict[str, int]:
    """The modules of the package that the three names load, and their lines."""
    loaded = modules_after("from django_dlock import Lock, locked, locked_view")
    return {name: lines(name) for name in loaded if name.partition(".")[0] == "django_dlock"}


def lines(module: str) -> int:
    path = PACKAGE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return len(file.read_text().splitlines())


def not_for_locks(module: str) -> bool:
    """Whether it belongs to something else, or is more of a store than the check of its settings.

    Stores are loaded with the first backend.
    """
    _, *rooms = module.split(".")
    of_a_store = rooms[:1] == ["backends"] and len(rooms) > 2 and rooms[1] != "shared"
    others = any(
        word in FOR_OTHERS or word.rstrip("s") in FOR_OTHERS
        for room in rooms
        for word in (room, *room.split("_"))
    )
    return others or (of_a_store and rooms[2:] != ["config"])


def test_locks_and_decorators_load_nothing_that_others_need() -> None:
    assert [module for module in sorted(for_locks()) if not_for_locks(module)] == []


def test_locks_and_decorators_load_few_lines() -> None:
    loaded = for_locks()
    listed = "\n".join(f"{loaded[name]:6} {name}" for name in sorted(loaded))
    total = sum(loaded.values())
    # A ceiling far above would not notice a new module.
    assert 0.9 * MOST_LINES < total <= MOST_LINES, f"{total} lines:\n{listed}"


@pytest.mark.parametrize(
    "module",
    [
        *("admin.base", "audit", "views.idempotent", "celery.options", "models", "task_url"),
        *("backends.redis.pool", "backends.database.rows", "metrics.config", "views.stored"),
    ],
)
def test_a_module_that_others_need_is_recognised(module: str) -> None:
    assert not_for_locks(f"django_dlock.{module}")


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


CONFIGURE = """
from django.conf import settings
settings.configure(INSTALLED_APPS=[])
"""


@pytest.mark.parametrize("name", ["LockedTask", "idempotent_view"])
@pytest.mark.parametrize(
    ("before", "error"),
    [
        ("", r"AppRegistryNotReady: %s needs Django.s models, .* not in celery\.py"),
        ("import django; django.setup()", "ImproperlyConfigured: %s needs .* INSTALLED_APPS.*migr"),
    ],
)
def test_an_import_that_needs_models_says_why_there_are_none(
    name: str, before: str, error: str
) -> None:
    code = f"{CONFIGURE}{before}\nfrom django_dlock import {name}"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    *_, last = answer.stderr.splitlines()
    assert re.search(error % name, last), answer.stderr
