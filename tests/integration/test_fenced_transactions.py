"""``lock.atomic()`` and the fence table, on the databases that people use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from django.db import OperationalError, connections, models, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_dlock import LeaseLost, Lock, NotHeld, StaleToken, locks
from django_dlock.models import Fence
from testproject.shop.models import Effect
from tests.support.databases import wait_until_one_waits
from tests.support.leases import lease_of

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("_fresh_local"),
]


@pytest.fixture
def _fresh_local() -> Iterator[None]:
    locks.reset()
    yield
    # No other file must meet the locks that a test has kept.
    locks.reset()


def holder(name: str = "it", using: str = "local") -> Lock:
    """A holder without renewal, signals and, for a while, a deadline."""
    lock = Lock(name, using=using, ttl=60, renew=False, bound=False)
    assert lock.acquire(blocking=False)
    return lock


def unknowing(name: str = "it") -> Lock:
    """A holder that has lost its lease without knowing, as if stopped after its check."""
    lock = holder(name)
    assert locks["local"].break_(name, owner=lock.owner)
    return lock


@pytest.fixture
def late() -> Lock:
    return unknowing()


@pytest.fixture
def present(late: Lock) -> Lock:
    """The next holder."""
    return holder()


def write(using: str, by: str) -> None:
    Effect.objects.using(using).create(order_number=1, by=by)


def written(using: str) -> list[str]:
    return list(Effect.objects.using(using).order_by("pk").values_list("by", flat=True))


def in_thread(using: str, function: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        try:
            function()
        finally:
            connections[using].close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_the_first_and_the_last_statement_compare_the_token(database, present):
    with present.atomic(using=database):
        write(database, "before")
    capture = CaptureQueriesContext(connections[database])
    with capture as captured, present.atomic(using=database):
        write(database, "in between")
    statements = [query["sql"] for query in captured]
    kinds = [statement.split()[0] for statement in statements]
    assert kinds == ["SELECT", "BEGIN", "UPDATE", "INSERT", "UPDATE", "COMMIT"]
    for statement in (statements[2], statements[4]):
        assert f"<= {present.token}" in statement
    row = Fence.objects.using(database).get()
    assert (row.alias, row.key_prefix, row.name) == ("local", "dlock", "it")
    assert row.token == present.token


def test_g3_a_late_transaction_does_not_begin(database, late, present):
    with present.atomic(using=database):
        write(database, "present")
    with pytest.raises(StaleToken, match="newer token") as told, late.atomic(using=database):
        write(database, "late")
    assert (told.value.name, told.value.alias) == ("it", "local")
    assert written(database) == ["present"]


def test_g3_a_late_transaction_that_gave_up_its_row_lock_does_not_commit(database, late, present):
    """MySQL, for instance, commits before DDL without telling the caller."""

    def come_after() -> None:
        with present.atomic(using=database):
            write(database, "present")

    def come_late() -> None:
        with late.atomic(using=database), connections[database].cursor() as cursor:
            cursor.execute("COMMIT")
            in_thread(database, come_after).join()
            cursor.execute("BEGIN")
            write(database, "late")

    with pytest.raises(StaleToken):
        come_late()
    assert written(database) == ["present"]


def lose(lock: Lock) -> None:
    lease_of(lock).lose("expired")


def test_g2_a_lease_that_ended_meanwhile_rolls_back_even_without_a_successor(database, present):
    with pytest.raises(LeaseLost, match="expired"), present.atomic(using=database):
        write(database, "asleep")
        lose(present)
    assert written(database) == []
    with pytest.raises(LeaseLost):
        present.atomic(using=database)


def test_a_lock_that_was_released_meanwhile_rolls_back(database, present):
    with pytest.raises(NotHeld), present.atomic(using=database):
        write(database, "too early")
        present.release()
    assert written(database) == []


def test_g3_a_newer_transaction_waits_for_an_older_one_that_has_begun(database, late, present):
    """Until COMMIT: nobody writes between the older one's last statement and its COMMIT."""
    done: list[list[str]] = []

    def come_after() -> None:
        with present.atomic(using=database):
            done.append(written(database))
            write(database, "newer")

    with late.atomic(using=database):
        write(database, "older")
        coming = in_thread(database, come_after)
        wait_until_one_waits(database, over=lambda: not coming.is_alive())
        assert not done
    coming.join()
    assert done == [["older"]]
    assert written(database) == ["older", "newer"]


def test_an_error_also_rolls_back_the_token(database, late, present):
    with pytest.raises(ZeroDivisionError), present.atomic(using=database):
        write(database, "broken")
        raise ZeroDivisionError
    assert written(database) == []
    # The newer holder has no row yet that the older one could damage.
    with late.atomic(using=database):
        pass


def test_a_requested_rollback_is_no_error(database, present):
    with present.atomic(using=database):
        write(database, "not wanted")
        transaction.set_rollback(True, using=database)
    assert written(database) == []


LOCAL = {"local": {"BACKEND": "django_dlock.backends.local.LocalBackend"}}


def test_each_alias_is_a_separate_name_space(database, present):
    with override_settings(DLOCKS={**LOCAL, "other": LOCAL["local"]}):
        for lock in (holder(using="other"), present):
            with lock.atomic(using=database):
                pass
    aliases = Fence.objects.using(database).values_list("alias", flat=True)
    assert sorted(aliases) == ["local", "other"]


def test_names_are_compared_exactly(database):
    names = ["straße", "strasse", "STRASSE", "é", "e\u0301", "a ", "a"]
    for name in names:
        with holder(name).atomic(using=database):
            pass
    assert set(Fence.objects.using(database).values_list("name", flat=True)) == set(names)


def test_each_key_prefix_is_a_separate_name_space(database, present):
    with present.atomic(using=database):
        pass
    staging = {"local": LOCAL["local"] | {"KEY_PREFIX": "staging"}}
    with override_settings(DLOCKS=staging), holder().atomic(using=database):
        pass
    prefixes = Fence.objects.using(database).values_list("key_prefix", flat=True)
    assert sorted(prefixes) == ["dlock", "staging"]


def test_the_parts_of_a_name_are_kept_apart():
    digests = {Fence.digest_of("a", "b", "cd"), Fence.digest_of("ab", "", "cd")}
    digests |= {Fence.digest_of("a", "bc", "d"), Fence.digest_of("a", "", "bcd")}
    assert len(digests) == 4


def test_many_first_transactions_at_once_leave_the_highest_token(database):
    many = [unknowing() for _ in range(5)] + [holder()]
    ends: dict[int, object] = {}
    barrier = threading.Barrier(len(many))

    def begin(lock: Lock) -> None:
        token = lock.token
        assert token is not None
        barrier.wait()
        try:
            with lock.atomic(using=database):
                write(database, str(token))
        except Exception as error:
            ends[token] = type(error)
        else:
            ends[token] = None

    threads = [in_thread(database, lambda lock=lock: begin(lock)) for lock in many]
    for thread in threads:
        thread.join()
    assert set(ends.values()) <= {None, StaleToken}
    assert ends[many[-1].token or 0] is None
    assert [end for end in ends.values() if end is None] == [None] * len(written(database))
    assert written(database) == sorted(written(database))
    assert Fence.objects.using(database).get().token == many[-1].token


def test_a_row_that_was_inserted_just_before_is_used(database, present, monkeypatch):
    with present.atomic(using=database):
        pass
    monkeypatch.setattr(models.QuerySet, "exists", lambda rows: False)
    with present.atomic(using=database):
        write(database, "again")
    assert Fence.objects.using(database).get().token == present.token


def test_a_transaction_whose_row_was_deleted_meanwhile_is_refused(database, present):
    with pytest.raises(StaleToken), present.atomic(using=database):
        Fence.objects.using(database).all().delete()


# -- other transactions ----------------------------------------------------------------


def test_inside_another_transaction_it_is_refused(database, present):
    refused = pytest.raises(RuntimeError, match=f"'it'.*outermost transaction on .*'{database}'")
    with transaction.atomic(using=database), refused:
        present.atomic(using=database).__enter__()
    connections[database].set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="outermost"):
            present.atomic(using=database).__enter__()
    finally:
        connections[database].rollback()
        connections[database].set_autocommit(True)


def test_a_transaction_on_another_database_does_not_matter(postgres_alias, present):
    with transaction.atomic(), present.atomic(using=postgres_alias):
        write(postgres_alias, "it")
    assert written(postgres_alias) == ["it"]


def test_it_may_contain_nested_transactions(database, late, present):
    with present.atomic(using=database), transaction.atomic(using=database):
        write(database, "inner")
    assert written(database) == ["inner"]


@pytest.mark.django_db(transaction=False)
def test_the_transaction_of_a_test_case_does_not_count(present):
    with present.atomic():
        write("default", "it")
    assert written("default") == ["it"]


WAIT = {
    "postgres": "SET SESSION lock_timeout = '100ms'",
    "mariadb": "SET SESSION innodb_lock_wait_timeout = 1",
}


# Of the module, so that Django's test case knows the alias when it begins.
@pytest.fixture(scope="module", params=WAIT)
def impatient(request):
    return request.getfixturevalue(f"{request.param}_alias")


def test_a_wait_that_is_too_long_is_an_error_of_the_database(impatient, late, present):
    """The newer holder has written nothing yet and may try again."""
    raised: list[BaseException] = []

    def come_after() -> None:
        with connections[impatient].cursor() as cursor:
            cursor.execute(WAIT[impatient])
        try:
            with present.atomic(using=impatient):
                write(impatient, "newer")
        except OperationalError as error:
            raised.append(error)

    with late.atomic(using=impatient):
        write(impatient, "older")
        in_thread(impatient, come_after).join()
    assert raised
    with present.atomic(using=impatient):
        write(impatient, "newer")
    assert written(impatient) == ["older", "newer"]
