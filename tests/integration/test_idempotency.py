"""The idempotency record, on the databases that people use."""

from __future__ import annotations

import datetime as dt
import threading
from dataclasses import replace

import pytest
from django.db import connections, transaction
from django.db.models.functions import Now

from django_dlock.exceptions import (
    AttemptsExhausted,
    BackendUnavailable,
    DuplicateRun,
    PayloadMismatch,
    StaleToken,
)
from django_dlock.models import IdempotencyRecord
from django_dlock.records import idempotency, payloads
from django_dlock.records.idempotency import Claim, ClaimRequest, Finished, InFlight

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

State = IdempotencyRecord.State


@pytest.fixture
def database(database: str) -> str:
    """An alias with an empty table of records, outside any transaction."""
    IdempotencyRecord.objects.using(database).all().delete()
    return database


def alive(*holder: str) -> bool:
    return True


def dead(*holder: str) -> bool:
    return False


def unreachable(*holder: str) -> bool:
    raise BackendUnavailable("no answer")


def request_of(owner: str, key: str = "42", **facts: object) -> ClaimRequest:
    request = ClaimRequest(
        scope="shop.charge",
        key=key,
        payload="p",
        ttl=dt.timedelta(days=7),
        lock_alias="default",
        lock_name="order:42",
        owner=owner,
    )
    return replace(request, **facts)  # type: ignore[arg-type]


def begin(owner: str, using: str, **facts: object) -> Claim:
    claimed = idempotency.claim(request_of(owner, **facts), holds=dead, using=using)
    assert isinstance(claimed, Claim)
    return claimed


def record(using: str) -> IdempotencyRecord:
    return IdempotencyRecord.objects.using(using).get()


def has_payload(using: str, payload: str) -> bool:
    """Whether the record has the payload, under the present key alone."""
    return record(using).payload == payloads.keyed("shop.charge", "42", payload)


def test_g12_a_finished_key_returns_its_recorded_result(database):
    idempotency.complete(begin("a", database), '"done"')
    again = idempotency.claim(request_of("b"), holds=alive, using=database)
    assert again == Finished('"done"', ending="returned")


def test_a_claim_stores_the_owner_and_the_lease(database):
    begin("a", database, token=7, task_id="t")
    row = record(database)
    assert (row.state, row.attempt, row.owner, row.token) == (State.RUNNING, 1, "a", 7)
    assert (row.lock_alias, row.lock_name, row.task_id) == ("default", "order:42", "t")
    assert row.expires_at - row.started_at >= dt.timedelta(days=6, hours=23)


def test_a_running_key_is_not_taken_from_an_owner_that_still_holds_the_lock(database):
    begin("a", database)
    other = idempotency.claim(request_of("b"), holds=alive, using=database)
    assert other == InFlight("default", "order:42", "a")
    assert record(database).owner == "a"


def test_the_backend_is_asked_about_the_lease_that_the_record_names(database):
    begin("a", database, lock_alias="other", lock_name="elsewhere")
    asked: list[tuple[str, ...]] = []

    def holds(*holder: str) -> bool:
        asked.append(holder)
        return True

    idempotency.claim(request_of("b"), holds=holds, using=database)
    assert asked == [("other", "elsewhere", "a")]


def test_g13_a_running_key_is_not_taken_while_the_backend_gives_no_answer(database):
    begin("a", database)
    with pytest.raises(BackendUnavailable):
        idempotency.claim(request_of("b"), holds=unreachable, using=database)
    assert record(database).attempt == 1


def test_g12_a_run_that_was_taken_over_cannot_complete_any_more(database):
    first = begin("a", database)
    second = begin("b", database)
    assert (second.attempt, second.deaths) == (2, 1)
    with pytest.raises(StaleToken):
        idempotency.complete(first)
    idempotency.complete(second, '"second"')
    assert record(database).result == '"second"'


def test_g12_a_stale_completion_rolls_back_what_its_transaction_wrote(database):
    first = begin("a", database)
    begin("b", database)

    def body() -> None:
        with transaction.atomic(using=database):
            begin("effect", database, key="effect")
            idempotency.complete(first)

    with pytest.raises(StaleToken):
        body()
    assert not IdempotencyRecord.objects.using(database).filter(key="effect").exists()


def test_g12_a_forgotten_key_that_was_claimed_again_is_not_completed_by_the_old_run(database):
    old = begin("a", database)
    assert IdempotencyRecord.objects.db_manager(database).forget("shop.charge", "42", force=True)
    new = begin("b", database)
    # As on a database that assigns a primary key twice.
    old = replace(old, record_id=new.record_id)
    with pytest.raises(StaleToken):
        idempotency.complete(old)
    assert record(database).state == State.RUNNING


def test_g12_many_claims_at_once_grant_one_run(database):
    barrier = threading.Barrier(6)
    answers: list[object] = []

    def race(owner: str) -> None:
        barrier.wait()
        try:
            answers.append(idempotency.claim(request_of(owner), holds=alive, using=database))
        finally:
            connections[database].close()

    threads = [threading.Thread(target=race, args=(str(n),)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(answer) for answer in answers].count(Claim) == 1
    assert [type(answer) for answer in answers].count(InFlight) == 5


def test_g12_many_take_overs_at_once_grant_one_run_per_attempt(database):
    begin("dead", database)
    barrier = threading.Barrier(6)
    claims: list[Claim] = []

    def race(owner: str) -> None:
        barrier.wait()
        try:
            claims.append(begin(owner, database, max_attempts=100))
        finally:
            connections[database].close()

    threads = [threading.Thread(target=race, args=(str(n),)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claim.attempt for claim in claims) == [2, 3, 4, 5, 6, 7]


def test_a_lost_race_for_a_new_key_does_not_spoil_the_callers_transaction(database, monkeypatch):
    winner = begin("a", database)
    read = idempotency._read
    blind = [True]

    def read_too_early(*args: object, locking: bool) -> object:
        return None if blind and blind.pop() else read(*args, locking=locking)

    monkeypatch.setattr(idempotency, "_read", read_too_early)
    with transaction.atomic(using=database):
        answer = idempotency.claim(request_of("b"), holds=alive, using=database)
        assert IdempotencyRecord.objects.using(database).count() == 1
    assert answer == InFlight("default", "order:42", winner.request.owner)


@pytest.mark.parametrize("end", [idempotency.mark_waiting, idempotency.mark_failed])
def test_g13_after_a_run_without_success_the_key_can_be_claimed_again(database, end):
    assert end(begin("a", database), "reason")
    row = record(database)
    assert (row.error, row.result) == ("reason", "")
    again = idempotency.claim(request_of("b"), holds=alive, using=database)
    assert isinstance(again, Claim)
    assert (again.attempt, again.deaths) == (2, 0)


@pytest.mark.parametrize("end", [idempotency.mark_waiting, idempotency.mark_failed])
def test_an_outdated_run_cannot_change_the_state_of_the_latest_run(database, end):
    first = begin("a", database)
    begin("b", database)
    assert not end(first, "late")
    assert record(database).state == State.RUNNING


def test_a_run_that_ended_cannot_end_again(database):
    claim = begin("a", database)
    idempotency.complete(claim, "1")
    assert not idempotency.mark_failed(claim, "late")
    with pytest.raises(StaleToken):
        idempotency.complete(claim, "2")
    assert record(database).result == "1"


def test_has_succeeded_is_true_only_for_this_run(database):
    first = begin("a", database)
    second = begin("b", database)
    assert not idempotency.has_succeeded(second)
    idempotency.complete(second)
    assert idempotency.has_succeeded(second)
    assert not idempotency.has_succeeded(first)


def test_g12_a_commit_that_still_runs_is_waited_for(postgres_alias):
    """The connection broke during COMMIT: the server has received the command, not executed it."""
    IdempotencyRecord.objects.using(postgres_alias).all().delete()
    claim = begin("a", postgres_alias)
    answers: list[bool] = []

    def ask() -> None:
        try:
            answers.append(idempotency.has_succeeded(claim))
        finally:
            connections[postgres_alias].close()

    asking = threading.Thread(target=ask)
    with transaction.atomic(using=postgres_alias), connections[postgres_alias].cursor() as cursor:
        idempotency.complete(claim)
        asking.start()
        waiting: list[object] = []
        while asking.is_alive() and not waiting:
            cursor.execute("SELECT 1 FROM pg_locks WHERE NOT granted")
            waiting = cursor.fetchall()
    asking.join()
    assert answers == [True]


def test_g14_the_same_key_with_another_payload_is_an_error(database):
    idempotency.complete(begin("a", database))
    with pytest.raises(PayloadMismatch, match="42"):
        idempotency.claim(request_of("b", payload="other"), holds=alive, using=database)


def test_g14_another_payload_is_an_error_after_a_failed_run_too(database):
    idempotency.mark_failed(begin("a", database), "x")
    with pytest.raises(PayloadMismatch):
        begin("b", database, payload="other")


def test_a_stored_payload_is_keyed(database):
    begin("a", database)
    assert record(database).payload != "p"
    assert has_payload(database, "p")


def test_g14_payloads_are_compared_after_the_secret_key_was_rotated(database, settings):
    settings.SECRET_KEY = "first"
    idempotency.complete(begin("a", database))
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "second", ["first"]
    assert isinstance(idempotency.claim(request_of("b"), holds=dead, using=database), Finished)
    with pytest.raises(PayloadMismatch):
        begin("b", database, payload="other")


def test_g14_without_the_earlier_secret_key_every_payload_is_another_one(database, settings):
    """It is not known whether it is the same work, so it does not run."""
    settings.SECRET_KEY = "first"
    idempotency.complete(begin("a", database))
    settings.SECRET_KEY = "second"
    with pytest.raises(PayloadMismatch):
        begin("b", database)


def test_the_next_run_stores_its_payload_under_the_present_key(database, settings):
    settings.SECRET_KEY = "first"
    idempotency.mark_failed(begin("a", database), "x")
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "second", ["first"]
    begin("b", database)
    settings.SECRET_KEY_FALLBACKS = []
    assert has_payload(database, "p")


def test_g14_a_payload_that_an_earlier_version_has_stored_is_compared(database):
    idempotency.complete(begin("a", database))
    IdempotencyRecord.objects.using(database).update(payload="p")
    assert isinstance(idempotency.claim(request_of("b"), holds=dead, using=database), Finished)
    with pytest.raises(PayloadMismatch):
        begin("b", database, payload="other")


def expire(using: str) -> None:
    expired = Now() - dt.timedelta(seconds=1)
    IdempotencyRecord.objects.using(using).update(expires_at=expired)


def test_an_expired_record_counts_as_absent(database):
    idempotency.complete(begin("a", database), "1")
    expire(database)
    again = begin("b", database, payload="other")
    # Not 1, because tokens still rise.
    assert again.attempt == 2
    assert has_payload(database, "other")


def test_a_run_longer_than_the_retention_is_not_taken_from_its_holder(database):
    begin("a", database)
    expire(database)
    answer = idempotency.claim(request_of("b"), holds=alive, using=database)
    assert isinstance(answer, InFlight)


def test_keys_are_compared_exactly(database):
    keys = ["straße", "strasse", "STRASSE", "é", "e\u0301", "a ", "a"]
    for key in keys:
        begin("a", database, key=key)
    assert IdempotencyRecord.objects.using(database).count() == len(keys)


def test_scope_and_key_are_kept_apart(database):
    begin("a", database, scope="a", key="bc")
    assert begin("b", database, scope="ab", key="c").attempt == 1


def test_runs_that_died_are_counted_until_the_key_fails_for_good(database):
    for attempt in (1, 2, 3):
        assert begin(f"run {attempt}", database, max_attempts=3).attempt == attempt
    with pytest.raises(AttemptsExhausted, match="3 runs"):
        begin("run 4", database, max_attempts=3)
    assert record(database).state == State.FAILED


def test_a_key_that_failed_for_good_may_be_claimed_again(database):
    begin("run 1", database, max_attempts=1)
    with pytest.raises(AttemptsExhausted):
        begin("run 2", database, max_attempts=1)
    assert begin("run 3", database, max_attempts=1).deaths == 0


def test_a_key_of_one_request_stays_failed_until_it_is_forgotten(database):
    once = {"max_attempts": 2, "stays_exhausted": True}
    for _ in range(2):
        begin("dies", database, **once)
    for _ in range(3):
        with pytest.raises(AttemptsExhausted, match=r"2 runs .* forget the record"):
            begin("again", database, **once)
    with pytest.raises(PayloadMismatch):
        begin("again", database, payload="other", **once)
    assert (record(database).state, record(database).attempt) == (State.FAILED, 3)
    IdempotencyRecord.objects.using(database).all().delete()
    assert begin("forgotten", database, **once).deaths == 0


def test_a_key_that_stays_failed_may_be_claimed_again_after_it_has_expired(database):
    once = {"max_attempts": 1, "stays_exhausted": True}
    begin("dies", database, **once)
    with pytest.raises(AttemptsExhausted):
        begin("again", database, **once)
    expire(database)
    assert begin("later", database, **once).deaths == 0


def test_the_count_of_deaths_survives_a_wait_but_not_a_failure(database):
    begin("dies", database)
    idempotency.mark_waiting(begin("waits", database))
    third = begin("third", database)
    assert third.deaths == 1
    idempotency.mark_failed(third, "x")
    assert begin("fourth", database).deaths == 0


def test_postgresql_updates_records_in_place(postgres_alias):
    """A heap-only tuple (HOT) update needs no work in the indexes, nor by VACUUM."""
    IdempotencyRecord.objects.using(postgres_alias).all().delete()
    with transaction.atomic(using=postgres_alias):
        for number in range(30):
            idempotency.mark_waiting(begin("a", postgres_alias, key=str(number)), "again")
            idempotency.complete(begin("b", postgres_alias, key=str(number)), "1")
        with connections[postgres_alias].cursor() as cursor:
            cursor.execute(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = %s",
                [IdempotencyRecord._meta.db_table],
            )
            updates, in_place = cursor.fetchone()
    assert updates == 90
    assert in_place == 90


def test_interrupted_runs_are_counted_until_the_key_fails_for_good(database):
    for _ in range(2):
        assert idempotency.mark_interrupted(begin("a", database, max_attempts=3), "lost")
        assert record(database).state == State.WAITING
    with pytest.raises(AttemptsExhausted, match=r"3 runs.*lost"):
        idempotency.mark_interrupted(begin("a", database, max_attempts=3), "lost")
    assert record(database).state == State.FAILED


def test_an_outdated_run_that_is_interrupted_does_not_fail_the_key(database):
    old = begin("a", database, max_attempts=1)
    begin("b", database, task_id="b")
    assert not idempotency.mark_interrupted(old, "lost")
    assert record(database).state == State.RUNNING


@pytest.mark.parametrize("end", ["running", "waiting", "succeeded"])
def test_g14_runs_of_one_task_may_have_other_arguments(database, end):
    first = begin("a", database, task_id="t")
    if end == "waiting":
        idempotency.mark_waiting(first)
    elif end == "succeeded":
        idempotency.complete(first, "1")
    again = idempotency.claim(
        request_of("b", task_id="t", payload="other"), holds=dead, using=database
    )
    if end == "succeeded":
        assert again == Finished("1", "t", "returned")
        assert has_payload(database, "p")
    else:
        assert isinstance(again, Claim)
        assert has_payload(database, "other")


def test_look_claims_nothing(database):
    find = idempotency.find_outcome
    assert find(request_of("b"), using=database) is None
    running = begin("a", database, task_id="t")
    assert find(request_of("b"), using=database) == InFlight("default", "order:42", "a", "t")
    idempotency.complete(running, "1")
    assert find(request_of("b"), using=database) == Finished("1", "t", "returned")
    with pytest.raises(PayloadMismatch):
        find(request_of("b", payload="other"), using=database)
    assert record(database).attempt == 1
    expire(database)
    assert find(request_of("b"), using=database) is None


# -- runs that were replaced ---------------------------------------------------------------


def replaced(using: str) -> None:
    """Step 0 of task ``t`` is done, and its replacement has been published."""
    idempotency.complete(begin("a", using, task_id="t"), ending="replaced")


def step(using: str, number: int, task_id: str = "t", payload: str = "p") -> object:
    request = request_of("of a step", task_id=task_id, step=number, payload=payload)
    return idempotency.claim(request, holds=dead, using=using)


def test_g12_a_replacement_runs_but_a_redelivery_of_the_original_does_not(database):
    replaced(database)
    assert step(database, 0) == Finished("", "t", "replaced")
    second = step(database, 1, payload="of step 1")
    assert isinstance(second, Claim)
    # Whatever happens to the replacement, step 0 is done.
    assert step(database, 0) == Finished("", "t", "replaced")
    idempotency.complete(second, "1")
    assert step(database, 0) == Finished("", "t", "replaced")
    assert step(database, 1) == Finished("1", "t", "returned")
    assert has_payload(database, "p")


def test_g12_no_other_run_starts_a_replaced_step_again(database):
    replaced(database)
    assert step(database, 0, task_id="other") == Finished("", "t", "replaced")
    second = step(database, 1)
    assert isinstance(step(database, 0, task_id="other"), InFlight)
    idempotency.mark_waiting(second)
    assert isinstance(step(database, 0, task_id="other"), InFlight)
    third = step(database, 1)
    idempotency.mark_failed(third, "no")
    with pytest.raises(DuplicateRun, match="forget"):
        step(database, 0, task_id="other")
    with pytest.raises(PayloadMismatch):
        step(database, 0, task_id="other", payload="other")
    # Its own message may be delivered again.
    assert isinstance(step(database, 1), Claim)


def test_g12_a_replacement_does_not_begin_before_the_replaced_step_is_done(database):
    """The transaction of the body that published it was rolled back."""
    first = begin("a", database, task_id="t")
    assert isinstance(step(database, 1), InFlight)
    idempotency.mark_waiting(first)
    assert isinstance(step(database, 1), InFlight)
    idempotency.complete(step(database, 0), ending="replaced")
    assert isinstance(step(database, 1), Claim)


def test_an_expired_record_of_a_replaced_run_counts_as_absent(database):
    replaced(database)
    expire(database)
    assert isinstance(step(database, 0, task_id="other", payload="other"), Claim)
    assert (record(database).step, record(database).ending) == (0, "")
    assert has_payload(database, "other")
