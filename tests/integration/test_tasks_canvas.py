"""Chains, groups, chords and chunks whose members are duplicates, requeued, skipped or killed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord
from celery.backends.redis import RedisBackend
from celery.canvas import Signature, chunks, xstarmap
from celery.exceptions import ChordError
from kombu import Connection

from django_dlock import DuplicateRun, PayloadMismatch
from testproject.servers import RedisServer, ServerNotFound
from tests.conftest import missing
from tests.integration.test_tasks_faults import hold, let_go, requeues, result
from tests.support.workers import PATIENCE, Place, Site, eventually, orders

pytestmark = pytest.mark.extended

QUEUES = ("celery", "prefork", "solo", "threads")
POINTS = ("recorded", "stored", "sending", "sent", "counted")
"""Where a member dies: its record is committed; its result is stored, too; it was counted, and
the body will be sent next; the body is sent; only the acknowledgement is missing."""

CLAIMS = hasattr(RedisBackend, "_chord_cleanup_script")
"""Since Celery 5.7 a worker first claims the sending of the body; others wait some seconds."""


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def site(
    request: pytest.FixtureRequest, redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A prefork worker and one with threads; results are in Redis with every broker."""
    broker = None
    if request.param == "rabbitmq":
        broker = request.getfixturevalue("rabbit_server").url
        with Connection(broker) as connection:
            for queue in QUEUES:
                connection.SimpleQueue(queue).clear()
    directory = tmp_path_factory.mktemp(request.param)
    with Site(redis, directory, broker=broker, tasks="tests.support.tasks_canvas") as site:
        site.worker("prefork", 3)
        site.worker("threads", 2)
        yield site


@pytest.fixture(scope="module")
def unlocking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A worker with a result backend that counts no members of chords."""
    directory = tmp_path_factory.mktemp("unlocking")
    results = directory / "results"
    results.mkdir()
    settings = {
        "CELERY_RESULT_BACKEND": f"file://{results}",
        "CELERY_RESULT_CHORD_RETRY_INTERVAL": 0.1,
        # For Celery's own tasks, as the documentation recommends.
        "CELERY_TASK_ACKS_LATE": True,
        "CELERY_TASK_REJECT_ON_WORKER_LOST": True,
    }
    tasks = "tests.support.tasks_canvas"
    try:
        with (
            RedisServer() as redis,
            Site(redis, directory, settings=settings, tasks=tasks) as site,
        ):
            site.app.conf.result_backend = settings["CELERY_RESULT_BACKEND"]
            site.worker("prefork", 2)
            yield site
    except ServerNotFound as error:
        missing(str(error))


def sig(site: Site, task: str, *args: Any, **options: Any) -> Signature:
    """A signature; by default for a pool whose processes may die."""
    options.setdefault("queue", "prefork")
    return site.app.signature(f"tests.support.tasks_canvas.{task}", args, options=options)


def some(count: int) -> list[int]:
    """New orders."""
    return [next(orders) for _ in range(count)]


def gathered(place: Place, order: int, count: int = 1) -> list[tuple[str, str]]:
    """Id and results of each run of the body, once there are ``count`` runs."""
    lines = place.wait(f"gathered-{order}", count)
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def die(place: Place, point: str, order: int) -> None:
    (place.path / f"die-{point}").write_text(str(order))


# -- endings of members --------------------------------------------------------------


def test_g13_a_chord_gets_every_result_however_its_members_end(site, place):
    new, done, busy, put, run = some(5)
    assert result(site.send("member", done, str(place))) == f"{done} run 1"
    hold(site, busy)
    hold(site, put)
    before = requeues(site)
    header = [
        sig(site, "member", new, str(place), queue="threads"),
        sig(site, "member", done, str(place)),
        sig(site, "member", done, str(place), queue="threads"),
        sig(site, "skipped", busy, str(place)),
        sig(site, "member", put, str(place)),
        sig(site, "unrecorded", put, str(place), queue="threads"),
        chain(sig(site, "member", run, str(place)), sig(site, "plain")),
        sig(site, "member", run, str(place)),
    ]
    sent = chord(header, sig(site, "gather", str(place), new))()
    eventually(lambda: requeues(site) - before >= 2)
    assert place.lines(f"gathered-{new}") == []
    let_go(site, put)
    results = result(sent)
    assert results.pop(5) in (f"{put} run 1", f"{put} run 2")
    assert results.pop(4) in (f"{put} run 1", f"{put} run 2")
    assert results == [
        *(f"{new} run 1", f"{done} run 1", f"{done} run 1", None),
        *(f"{run} run 1", f"{run} run 1"),
    ]
    assert len(gathered(place, new)) == 1
    let_go(site, busy)


def test_g13_a_chain_continues_after_a_duplicate_a_skipped_and_a_requeued_member(site, place):
    done, busy, put, last = some(4)
    assert result(site.send("member", done, str(place))) == f"{done} run 1"
    hold(site, busy)
    hold(site, put)
    steps = [
        sig(site, "member", done, str(place)),
        sig(site, "next_member", last, str(place)),
        sig(site, "gather", str(place), last),
        sig(site, "skipped", busy, str(place), queue="threads").set(immutable=True),
        sig(site, "gather", str(place), busy),
        sig(site, "member", put, str(place), queue="threads").set(immutable=True),
        sig(site, "gather", str(place), put),
    ]
    sent = chain(steps).apply_async()
    assert gathered(place, last)[0][1] == f"{done} run 1, {last} run 1"
    assert gathered(place, busy)[0][1] == "None"
    let_go(site, put)
    assert result(sent) == f"{put} run 1"
    let_go(site, busy)


def test_g13_a_member_that_replaces_itself_is_counted_by_its_replacement(site, place):
    one, two, last = some(3)
    header = [
        sig(site, "member", one, str(place), "chain"),
        sig(site, "member", two, str(place), "group", queue="threads"),
        sig(site, "member", last, str(place)),
    ]
    sent = chord(header, sig(site, "gather", str(place), last))()
    replaced, both, run = result(sent)
    assert (replaced, run) == (f"{one} replaced", f"{last} run 1")
    # Only since Celery 5.7 they are in order.
    assert sorted(both) == [f"{two} left", f"{two} right"]
    following = chain(
        sig(site, "member", next(orders), str(place), "chain"), sig(site, "plain")
    ).apply_async()
    assert str(result(following)).endswith("replaced")


def test_a_failed_member_fails_its_chord_and_its_chain(site, place):
    bad, good, broken = some(3)
    body = sig(site, "gather", str(place), bad)
    body.link_error(sig(site, "failed", str(place), bad))
    header = [
        sig(site, "member", bad, str(place), "fail"),
        sig(site, "member", good, str(place)),
        sig(site, "member", good, str(place), queue="threads"),
    ]
    chorded = chord(header, body).apply_async()
    chained = chain(
        sig(site, "member", broken, str(place), "fail", queue="threads"),
        sig(site, "gather", str(place), broken),
    ).apply_async(link_error=sig(site, "failed", str(place), broken))
    # Either the chord's error or that of its member, which the client sees first.
    with pytest.raises((ChordError, ValueError), match=f"order {bad}"):
        result(chorded)
    with pytest.raises(ValueError, match=f"order {broken}"):
        result(chained)
    assert place.wait(f"failed-{bad}")[0].endswith(str(chorded.id))
    assert place.wait(f"failed-{broken}")[0].endswith(str(chained.parent.id))
    assert place.lines(f"gathered-{bad}") == place.lines(f"gathered-{broken}") == []


# -- chunks --------------------------------------------------------------------------------


def test_the_items_of_chunks_exclude_each_other(site, place):
    numbers = [(number, str(place)) for number in range(12)]
    item = site.app.signature("tests.support.tasks_canvas.item")
    found = chunks(item, numbers, 3, app=site.app).apply_async()
    results = itertools.chain.from_iterable(found.get(timeout=PATIENCE))
    assert list(results) == [number * 10 for number in range(12)]
    assert len(set(place.lines("items"))) == 12


def test_g12_a_finished_item_returns_its_result_and_a_failing_one_ends_its_chunk(site, place):
    one, two = some(2)
    again = [(one, str(place)), (two, str(place)), (one, str(place), "fail")]
    member = site.app.signature("tests.support.tasks_canvas.member")
    assert result(site.send("member", one, str(place))) == f"{one} run 1"
    found = xstarmap(member, again[:2], app=site.app).apply_async()
    assert result(found) == [f"{one} run 1", f"{two} run 1"]
    found = xstarmap(member, [(two, str(place)), again[2]], app=site.app).apply_async()
    with pytest.raises(PayloadMismatch):
        result(found)


def test_g12_a_redelivered_message_has_the_same_items_as_before(site, place):
    one, two = some(2)
    once = site.app.signature("tests.support.tasks_canvas.item_once")
    # The second item is refused as a duplicate: another run did it.
    items = [(one, str(place)), (two, str(place))]
    for _ in range(2):
        found = xstarmap(once, items, app=site.app).apply_async(task_id=f"chunk-{one}")
        assert result(found) == [f"{one} run 1", f"{two} run 1"]
        assert len(place.lines(f"began-{one}")) == 1
    with pytest.raises(DuplicateRun):
        result(xstarmap(once, items, app=site.app).apply_async())


# -- deaths --------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_g13_a_chord_whose_last_member_dies_sends_its_body_with_every_result(site, place, point):
    first, second, last = some(3)
    die(place, point, last)
    header = [
        sig(site, "member", last, str(place), "wait"),
        sig(site, "member", first, str(place)),
        sig(site, "member", second, str(place), queue="threads"),
    ]
    sent = chord(header, sig(site, "gather", str(place), last))()
    members = sent.parent.results
    for member in members[1:]:
        result(member)
    before = requeues(site)
    place.open("wait")
    place.wait(f"died-{point}")
    if CLAIMS and point in ("sending", "sent"):
        eventually(lambda: requeues(site) > before, why="requeued while the body is claimed")
        # Without this, the dead worker's claim would end some seconds later.
        claim = site.app.backend.get_key_for_group(sent.parent.id, ".c")
        assert site.app.backend.client.pexpire(claim, 1)
    everything = [f"{order} run 1" for order in (last, first, second)]
    assert result(sent) == everything
    repeated = 2 if point == "sent" else 1
    assert set(gathered(place, last, repeated)) == {(sent.id, str(everything))}
    assert len(place.lines(f"began-{last}")) == 1


@pytest.mark.parametrize("task", ["member", "unrecorded"])
def test_g13_a_member_that_dies_after_it_was_counted_is_counted_once(site, place, task):
    """Otherwise the body would get its result twice and miss another result."""
    first, second, third = some(3)
    die(place, "counted", first)
    header = [
        sig(site, task, first, str(place)),
        sig(site, "member", second, str(place)),
        sig(site, "member", third, str(place), "wait", queue="threads"),
    ]
    sent = chord(header, sig(site, "gather", str(place), first))()
    place.wait("died-counted")
    # The first run died before it could report this.
    repeated = f"[{sent.parent.results[0].id}] succeeded"
    eventually(lambda: any(repeated in worker.output for worker in site.workers))
    place.open("wait")
    assert result(sent) == [f"{order} run 1" for order in (first, second, third)]
    assert len(gathered(place, first)) == 1


def test_g13_a_member_that_fails_and_dies_sends_errbacks_with_the_same_ids(site, place):
    bad, good = some(2)
    die(place, "counted", bad)
    failing = sig(site, "member", bad, str(place), "fail")
    failing.link_error(sig(site, "failed", str(place), bad))
    body = sig(site, "gather", str(place), good)
    body.link_error(sig(site, "failed", str(place), good))
    sent = chord([failing, sig(site, "member", good, str(place), "wait")], body)()
    told = place.wait(f"failed-{bad}", 2)
    assert len(set(told)) == 1
    assert place.lines(f"failed-{good}") == []
    place.open("wait")
    assert place.wait(f"failed-{good}")[0].endswith(str(sent.id))
    assert place.lines(f"gathered-{good}") == []


@pytest.mark.parametrize("shape", ["chain", "group"])
def test_g13_a_member_that_dies_after_it_sent_its_replacement_is_counted_once(site, place, shape):
    """It runs again and sends its replacement again with the same ids."""
    replaced, last = some(2)
    die(place, "replaced", replaced)
    header = [
        sig(site, "member", replaced, str(place), shape),
        sig(site, "member", last, str(place), "wait", queue="threads"),
    ]
    sent = chord(header, sig(site, "gather", str(place), last))()
    place.wait(f"began-{replaced}", 2)
    by = result(sent.parent.results[0])
    if shape == "chain":
        assert by == f"{replaced} replaced"
    else:
        assert sorted(by) == [f"{replaced} left", f"{replaced} right"]
    assert place.lines(f"gathered-{last}") == []
    place.open("wait")
    assert result(sent) == [by, f"{last} run 1"]
    assert set(gathered(place, last)) == {(sent.id, str([by, f"{last} run 1"]))}


@pytest.mark.parametrize("point", ["recorded", "sent"])
def test_g13_a_repeated_run_sends_callbacks_and_the_rest_of_its_chain_with_the_same_ids(
    site, place, point
):
    order, linked = some(2)
    die(place, point, order)
    callback = chain(sig(site, "plain"), sig(site, "gather", str(place), linked))
    sent = chain(
        sig(site, "member", order, str(place)).set(link=callback),
        sig(site, "gather", str(place), order),
    ).apply_async()
    assert result(sent) == f"{order} run 1"
    place.wait(f"died-{point}")
    count = 2 if point == "sent" else 1
    assert set(gathered(place, order, count)) == {(sent.id, f"{order} run 1")}
    assert len(set(gathered(place, linked, count))) == 1
    assert len(place.lines(f"began-{order}")) == 1


def test_g13_a_chord_completes_after_the_death_of_a_whole_worker(site, place):
    """No process is left to requeue the member: the broker redelivers it."""
    first, last = some(2)
    die(place, "recorded", last)
    header = [sig(site, "member", first, str(place)), sig(site, "member", last, str(place))]
    header[1].set(queue="solo")
    worker = site.worker("solo", 1)
    sent = chord(header, sig(site, "gather", str(place), last))()
    place.wait("died-recorded")
    worker.process.wait(PATIENCE)
    if site.env["TASKS_SETTINGS"].count("amqp://") == 0:
        site.redeliver()
    site.worker("solo", 1)
    assert result(sent) == [f"{first} run 1", f"{last} run 1"]
    assert len(gathered(place, last)) == len(place.lines(f"began-{last}")) == 1


@pytest.mark.parametrize("point", ["recorded", "counted"])
def test_g13_a_chord_joined_by_celerys_own_task_gets_every_result(unlocking, point):
    """As with every result backend that does not count members: files here, or a database."""
    place = unlocking.place()
    first, last = some(2)
    die(place, point, last)
    header = [sig(unlocking, "member", order, str(place)) for order in (first, last)]
    chord(header, sig(unlocking, "gather", str(place), last))()
    assert gathered(place, last)[0][1] == str([f"{first} run 1", f"{last} run 1"])
    assert len(place.lines("died-" + point)) >= 1


def test_g13_a_chunk_whose_worker_dies_in_the_middle_takes_effect_once(unlocking):
    place = unlocking.place()
    numbers = some(3)
    die(place, "recorded", numbers[1])
    member = unlocking.app.signature("tests.support.tasks_canvas.member")
    items = [(order, str(place)) for order in numbers]
    sent = xstarmap(member, items, app=unlocking.app).apply_async()
    place.wait("died-recorded")
    assert result(sent) == [f"{order} run 1" for order in numbers]
