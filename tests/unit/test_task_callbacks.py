"""The ids of the messages that a task sends when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.app.task import Context

from django_dlock.celery.canvas import chords
from django_dlock.celery.canvas.callbacks import named
from django_dlock.celery.parent import LockedRequest
from tests.conftest import NOBODY
from tests.support.deliveries import effects, in_memory, recorded, states, task, waiting, work

pytestmark = pytest.mark.django_db(transaction=True)

ID = "f0000000-0000-4000-8000-000000000000"


@pytest.fixture
def app() -> Iterator[Celery]:
    with in_memory() as app:
        yield app


@pytest.fixture
def other(app: Celery) -> Any:
    """A plain Celery task, whose runs do not matter here."""

    @app.task(name="other", shared=False, lazy=False)
    def other(*args: object) -> None: ...

    return other


def sent(app: Celery) -> list[tuple[str, str, object]]:
    """Name, id and position in its group of each message in the queue; empties the queue."""
    messages = iter(lambda: waiting(app), None)
    return [(m.headers["task"], m.headers["id"], m.headers["group_index"]) for m in messages]


def sent_by_each(app: Celery, made: Any, **options: Any) -> list[list[tuple[str, str, object]]]:
    """The messages that two deliveries of one message send."""
    found = []
    for _ in range(2):
        made.apply_async((1,), task_id=ID, **options)
        work(app)
        found.append(sent(app))
    return found


SHAPES: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "one": (1, lambda s: s),
    "several": (3, lambda s: [s.clone((1,)), s.clone((2,)), s.clone((3,))]),
    "a chain": (1, lambda s: chain(s, s, s)),
    "a group": (3, lambda s: group(s, s, chain(s, s))),
    "a chord": (2, lambda s: chord([s, s], s)),
    "a group and another": (3, lambda s: [group(s, s), s]),
    "a chain that begins with a group": (2, lambda s: chain(group(s, s), s, s)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_g13_a_repeated_run_sends_its_callbacks_with_the_same_ids(app, other, shape):
    count, link = SHAPES[shape]
    first, second = sent_by_each(app, recorded(app), link=link(other.s()))
    assert first == second
    assert len({task_id for _, task_id, _ in first}) == count


def test_g13_a_repeated_run_also_gives_later_messages_the_same_ids(app, other):
    """The end of a chain and the body of a chord are part of the messages sent first."""
    made, found = recorded(app), []
    for _ in range(2):
        made.apply_async(
            (1,), task_id=ID, link=[chain(other.s(), other.s()), chord([other.s()] * 2, other.s())]
        )
        work(app)
        ids = set()
        while message := waiting(app):
            _, _, embed = message.decode()
            later = [*(embed["chain"] or []), *filter(None, [embed["chord"]])]
            ids |= {signature["options"]["task_id"] for signature in later}
        found.append(ids)
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_g13_a_repeated_run_continues_its_chain_with_the_same_id(app, other):
    made = recorded(app)
    # A chain that Celery publishes has an id already; one given by the caller has none.
    first, second = sent_by_each(app, made, chain=[dict(other.s())])
    assert first == second
    assert len(first) == 1


def test_g13_a_repeated_failure_sends_its_errbacks_with_the_same_ids(app, other):
    def body(self, order):
        raise RuntimeError

    def links():
        return {"link": other.s(), "link_error": [other.s(), other.s(2)]}

    made = task(app, body)
    # As for an errback unknown to the worker: it is sent, not called.
    del app.tasks["other"]
    first, second = (sent_by_each(app, made, **links())[0] for _ in range(2))
    assert first == second
    assert len({task_id for _, task_id, _ in first}) == 2


def test_the_errbacks_of_a_chord_have_the_same_ids_whichever_member_sends_them(app, other):
    def body(self, order):
        raise RuntimeError

    made, found = task(app, body), []
    del app.tasks["other"]
    body_of_chord = made.s(2).set(task_id=ID, link_error=[other.s()])
    for _ in range(2):
        chord([made.s(1), made.s(1)], body_of_chord.clone()).apply_async()
        for _ in range(2):
            work(app)
        found.append(sent(app))
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_g13_a_worker_that_reports_a_hard_limit_sends_errbacks_with_the_same_ids(app, other):
    made, found = recorded(app, time_limit=1), []
    del app.tasks["other"]
    for _ in range(2):
        made.apply_async((1,), task_id=ID, link_error=[other.s()])
        request = LockedRequest(waiting(app), app=app, task=made, on_ack=lambda *_: None)
        request.on_timeout(soft=False, timeout=1)
        found.append(sent(app))
    assert found[0] == found[1]
    assert len(found[0]) == 1


@pytest.mark.parametrize("shape", ["a chain", "a group", "a chord"])
def test_g13_a_repeated_run_replaces_itself_with_the_same_ids(app, other, shape):
    count, make = SHAPES[shape]
    replaced = make(other.si())

    def body(self, order):
        return self.replace(replaced.clone())

    first, second = sent_by_each(app, task(app, body))
    assert first == second
    assert len({task_id for _, task_id, _ in first}) == count
    assert ID not in [task_id for _, task_id, _ in first]


def test_a_replacement_that_replaces_itself_uses_no_id_twice(app, other):
    def inner(self, order):
        return self.replace(chain(other.si(), other.si()))

    def outer(self, order):
        return self.replace(chain(other.si(), made.si(2)))

    made = task(app, inner)
    task(app, outer).apply_async((1,), task_id=ID)
    work(app)
    [(_, first, _)] = sent(app)
    # It has the result of the first one, and so its id.
    made.apply_async((2,), task_id=ID, replaced_task_nesting=1)
    work(app)
    [(_, second, _)] = sent(app)
    assert first != second


def test_a_given_id_is_kept_and_the_original_signature_is_not_changed(app, other):
    given = group(other.s().set(task_id="mine"), other.s())
    copy = named(app, given, ID, "link.0")
    assert copy.tasks[0].id == "mine"
    assert [each.id for each in given.tasks] == ["mine", None]


def test_the_callbacks_of_an_eager_task_are_not_changed(app, other):
    link = other.s()
    made = recorded(app)
    assert made.apply((1,), link=link).get() == 1
    assert link.id is None


def test_g13_a_finished_member_does_not_fail_if_its_chord_cannot_be_read(monkeypatch):
    """With a Celery before 5.7, which cannot tell whether a member was counted."""
    monkeypatch.setattr(chords, "_claims", lambda backend: False)
    app = Celery("away", broker="memory://", backend=NOBODY, set_as_current=False)
    request = Context(id=ID, group="g", group_index=0, chord={"task": "other"})
    assert chords.counted_result(task(app), request, "done") == "done"


@pytest.mark.parametrize(
    ("what", "warning"),
    [
        ("canvas.callbacks._name_list", "cannot get stable ids"),
        ("canvas.chords._counting", "cannot read which members are counted"),
    ],
)
def test_g12_an_unknown_version_of_celery_does_not_fail_finished_work(
    app, monkeypatch, caplog, what, warning
):
    """Private names of Celery change; code that only reads them must not undo a commit."""

    def changed(*args: object) -> None:
        raise AttributeError("'Redis' object has no attribute '_chord_zset'")

    monkeypatch.setattr(f"django_dlock.celery.{what}", changed)
    made = recorded(app)
    sent = made.apply_async((1,), link=made.si(2))
    work(app)
    assert sent.state == "SUCCESS"
    assert effects() == 1
    assert states() == ["succeeded"]
    assert warning in caplog.text
    # The link is still sent.
    assert waiting(app) is not None


def test_a_replacement_is_sent_although_its_ids_cannot_be_set(app, monkeypatch, caplog):
    def changed(*args: object, **options: object) -> None:
        raise AttributeError("'Signature' object has no attribute 'clone'")

    monkeypatch.setattr("django_dlock.celery.canvas.callbacks.named", changed)
    other = task(app)

    def body(self, order):
        raise self.replace(other.si(7))

    recorded(app, body).delay(1)
    work(app)
    assert waiting(app).headers["task"] == other.name
    assert "cannot get stable ids" in caplog.text
