"""Servers and backends for the tests.

The tests start every server on a free port, and never use one that runs on the machine already. If
one is missing, each test that needs it is skipped at home and fails in CI.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
from django.core.management import call_command
from pytest_django import DjangoDbBlocker

from django_dlock.backends.base import AliasOptions
from django_dlock.backends.local import LocalBackend
from django_dlock.backends.redis import RedisBackend
from testproject.processes import OwnProcess
from testproject.rabbit import RabbitServer
from testproject.servers import RedisServer
from tests.levels import (  # noqa: F401 - hooks
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_report_header,
)
from tests.support import databases, mariadb, postgres
from tests.support.etcd import EtcdServer
from tests.support.pgbouncer import PgBouncer
from tests.support.proxy import Proxy
from tests.support.zookeeper import ZooKeeperServer

S = TypeVar("S", bound=OwnProcess)

NOBODY = "redis://127.0.0.1:1/0"
"""The settings point to this address without a server, so they never use another Redis."""

_session_redis: RedisServer | None = None
_no_redis = "not started"


def missing(reason: str) -> NoReturn:
    """Skip because a service is missing; in CI, fail."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def started(server: S) -> Iterator[S]:
    """The server while it runs, for a fixture to ``yield from``."""
    try:
        server.start()
    except RuntimeError as error:
        # Not installed, or it did not come up.
        missing(str(error))
    yield server
    server.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start the session's Redis, then load the settings, which read its address."""
    global _session_redis, _no_redis
    from django.conf import settings

    if settings.configured:
        raise pytest.UsageError(
            "Unset DJANGO_SETTINGS_MODULE and leave out --ds: the settings read REDIS_URL, which "
            "tests/conftest.py sets when it has started a Redis"
        )
    os.environ["REDIS_URL"] = NOBODY
    # Under xdist each worker has its own server, and the controlling process has none.
    steers = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    idle = config.option.help or config.option.collectonly or _only_units(config)
    if not (steers or idle):
        try:
            _session_redis = RedisServer().start()
        except RuntimeError as error:
            _no_redis = str(error)
        else:
            os.environ["REDIS_URL"] = _session_redis.url
    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    import django

    django.setup()
    # Sessions that are open when a test stops their server would write that into the output.
    logging.getLogger("kazoo").addHandler(logging.NullHandler())
    _write_no_events()
    if steers:
        # Otherwise its workers would load the settings before they know of a server.
        del os.environ["DJANGO_SETTINGS_MODULE"]


def _only_units(config: pytest.Config) -> bool:
    units = Path(__file__).parent / "unit"
    named = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return all(path.is_relative_to(units) for path in named)


def _write_no_events() -> None:
    """Leave the table of lock events empty, except in tests with the fixture ``lock_events``.

    Another thread writes them with its own database connection, so they would outlive the
    transaction of their test.
    """
    from django_dlock import signals

    signals.lost.disconnect(dispatch_uid="django_dlock.operators.audit.lost")
    signals.broken.disconnect(dispatch_uid="django_dlock.operators.audit.broken")
    signals.waited_long.disconnect(dispatch_uid="django_dlock.operators.audit.waited")


@pytest.fixture
def lock_events() -> Iterator[None]:
    """Lock events are written to their table, as in a project."""
    from django_dlock.core import dispatch
    from django_dlock.operators import audit

    audit.connect()
    yield
    assert dispatch.flush(30)
    _write_no_events()


def pytest_sessionfinish() -> None:
    """Release leases while the servers still run, and before the summary is printed."""
    from django_dlock import locks
    from django_dlock.core import watchdog

    logger = logging.getLogger("django_dlock")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    watchdog.shutdown()
    locks.reset()


def pytest_unconfigure() -> None:
    if _session_redis is not None:
        _session_redis.stop()


@pytest.fixture(scope="session")
def redis_server() -> RedisServer:
    """The Redis of the settings; do not stop or flush it. See ``own_redis`` for that."""
    if _session_redis is None:
        missing(_no_redis)
    return _session_redis


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis for this test only, which may be paused, killed, restarted and flushed."""
    yield from started(RedisServer())


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[RabbitServer]:
    """A RabbitMQ shared by the tests that need one, started by the first; do not stop it."""
    yield from started(RabbitServer())


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    """An etcd shared by the tests that need one, started by the first; do not stop it."""
    yield from started(EtcdServer())


@pytest.fixture(scope="session")
def zookeeper_server() -> Iterator[ZooKeeperServer]:
    """A ZooKeeper shared by the tests that need one, started by the first; do not stop it."""
    yield from started(ZooKeeperServer())


@pytest.fixture
def own_etcd() -> Iterator[EtcdServer]:
    """An etcd for this test only, which may be paused, killed and restarted."""
    yield from started(EtcdServer())


@pytest.fixture
def proxy(own_redis: RedisServer) -> Iterator[Proxy]:
    """A proxy in front of ``own_redis``."""
    with Proxy("127.0.0.1", own_redis.port) as before:
        yield before


@pytest.fixture
def local_backend() -> LocalBackend:
    return LocalBackend(AliasOptions(alias="local", backend="local"))


@pytest.fixture
def redis_backend(redis_server: RedisServer) -> Iterator[RedisBackend]:
    """The Redis backend on the session's server, with its own key prefix."""
    backend = RedisBackend(
        AliasOptions(
            alias="redis",
            backend="redis",
            location=redis_server.url,
            command_timeout=20.0,
            key_prefix=f"test-{secrets.token_hex(4)}",
        )
    )
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """An empty database on a PostgreSQL."""
    try:
        with postgres.database() as url:
            yield url
    except postgres.PostgresNotFound as error:
        missing(str(error))


@pytest.fixture(scope="session")
def pooler(postgres_url: str) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode in front of the server of ``postgres_url``."""
    yield from started(PgBouncer(postgres_url))


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """An empty database on a MariaDB."""
    try:
        with mariadb.database() as url:
            yield url
    except mariadb.MariadbNotFound as error:
        missing(str(error))


# Only for one module, because tests that flush all databases would flush these, too.
@pytest.fixture(scope="module")
def postgres_alias(
    postgres_url: str, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[str]:
    """The alias of a migrated PostgreSQL database."""
    yield from _migrated("postgres", postgres.settings_for(postgres_url), django_db_blocker)


@pytest.fixture(scope="module")
def mariadb_alias(
    mariadb_url: str, django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[str]:
    """The alias of a migrated MariaDB database."""
    yield from _migrated("mariadb", mariadb.settings_for(mariadb_url), django_db_blocker)


@pytest.fixture(scope="module")
def mysqlclient_alias(mariadb_alias: str, mariadb_url: str) -> Iterator[str]:
    """The alias of the same database over mysqlclient; the other one uses PyMySQL."""
    if importlib.util.find_spec("MySQLdb") is None:
        missing("mysqlclient is not installed: it needs a compiler, pkg-config and libmariadb-dev")
    with databases.added("mysqlclient", mariadb.settings_for(mariadb_url, "mysqlclient")) as alias:
        yield alias


def _migrated(alias: str, settings: dict[str, Any], blocker: DjangoDbBlocker) -> Iterator[str]:
    with databases.added(alias, settings):
        with blocker.unblock():
            call_command("migrate", database=alias, verbosity=0)
        yield alias


@pytest.fixture(scope="module", autouse=True)
def _known_before_the_first_test(request: pytest.FixtureRequest) -> None:
    """Make the databases of a module's tests before any of them begins.

    Django decides then which databases a test's threads may use, and which ones it empties; with
    "__all__", those that are known. A test requests its ``database`` only later.
    """
    for alias in databases.ALL[1:]:
        if any(_is_on(alias, item, request.node) for item in request.session.items):
            with contextlib.suppress(pytest.skip.Exception):
                request.getfixturevalue(f"{alias}_alias")


def _is_on(alias: str, item: pytest.Item, module: pytest.Module) -> bool:
    """Whether a test of the module uses all databases, and this one as its ``database``."""
    mark, call = item.get_closest_marker("django_db"), getattr(item, "callspec", None)
    return (
        mark is not None
        and mark.kwargs.get("databases") == "__all__"
        and call is not None
        and call.params.get("database") == alias
        and item.getparent(pytest.Module) is module
    )


@pytest.fixture(params=databases.ALL)
def database(request: pytest.FixtureRequest) -> str:
    """The alias of a migrated database of each kind."""
    alias: str = request.param
    if alias != "default":
        request.getfixturevalue(f"{alias}_alias")
    return alias
