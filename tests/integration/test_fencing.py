"""``lock.fence()`` and its field, on the databases that people use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections, models, transaction
from django.db.migrations.writer import MigrationWriter
from django.db.models import F
from django.test.utils import CaptureQueriesContext, isolate_apps

import django_dlock
from django_dlock import FencingTokenField, LeaseLost, Lock, NotHeld, StaleToken, locks
from testproject.shop.models import Order, Stock
from tests.support.databases import wait_until_one_waits
from tests.support.leases import lease_of

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.usefixtures("_fresh_local"),
]

with isolate_apps("testproject.shop"):

    class Thing(models.Model):
        class Meta:
            abstract = True
            app_label = "shop"

        def __str__(self) -> str:
            return f"{type(self).__name__} {self.pk}"

    class Shelf(Thing):
        name = models.CharField(max_length=20)
        room = models.CharField(max_length=20, default="hall")
        fence = FencingTokenField()

    class Fridge(Shelf):
        degrees = models.IntegerField(default=4)

        class Meta:
            app_label = "shop"

    class Box(Thing):
        shelf = models.ForeignKey(Shelf, models.CASCADE)
        label = models.CharField(max_length=20, default="")
        fence = FencingTokenField()

    class Door(Thing):
        colour = models.CharField(max_length=20, default="")
        inside = FencingTokenField()
        outside = FencingTokenField()


@pytest.fixture
def _fresh_local() -> Iterator[None]:
    locks.reset()
    yield
    locks.reset()


@pytest.fixture
def tables(database: str) -> Iterator[str]:
    """The alias of a database with the tables of the models above."""
    with connections[database].schema_editor() as editor:
        for model in (Shelf, Fridge, Box, Door):
            editor.create_model(model)
    yield database
    with connections[database].schema_editor() as editor:
        for model in (Door, Box, Fridge, Shelf):
            editor.delete_model(model)


def holder(name: str = "it") -> Lock:
    """A holder without renewal, signals and, for a while, a deadline."""
    lock = Lock(name, using="local", ttl=60, renew=False, bound=False)
    assert lock.acquire(blocking=False)
    return lock


@pytest.fixture
def late() -> Lock:
    """A holder that has lost its lease without knowing, as if stopped after its check."""
    lock = holder()
    assert locks["local"].break_("it", owner=lock.owner)
    return lock


@pytest.fixture
def present(late: Lock) -> Lock:
    """The next holder."""
    return holder()


def stock(using: str, article: int = 1, count: int = 10, fence: int | None = 0) -> Stock:
    return Stock.objects.using(using).create(article=article, count=count, fence=fence)


def stocks(using: str) -> list[tuple[int, int]]:
    """Count and token of all rows, by article."""
    rows = Stock.objects.using(using).order_by("article")
    return list(rows.values_list("count", "fence"))


# -- querysets -------------------------------------------------------------------------


def test_an_update_leaves_the_token_in_the_rows(database, present):
    stock(database, 1)
    stock(database, 2)
    stock(database, 3)
    some = Stock.objects.using(database).filter(article__lt=3)
    assert present.fence(some).update(count=F("count") - 1) == 2
    assert stocks(database) == [(9, present.token), (9, present.token), (10, 0)]


def test_comparison_and_write_are_one_statement(database, present):
    stock(database)
    with CaptureQueriesContext(connections[database]) as captured:
        present.fence(Stock.objects.using(database)).update(count=1)
    updates = [query["sql"] for query in captured if query["sql"].startswith("UPDATE")]
    assert len(updates) == 1
    assert f"<= {present.token}" in updates[0]


def test_g3_a_late_update_is_refused(database, late, present):
    stock(database)
    rows = Stock.objects.using(database)
    present.fence(rows).update(count=20)
    with pytest.raises(
        StaleToken, match=f"shop.Stock.fence has seen token {present.token}"
    ) as told:
        late.fence(rows).update(count=30)
    assert (told.value.name, told.value.alias) == ("it", "local")
    assert stocks(database) == [(20, present.token)]


def test_one_row_with_a_newer_token_prevents_the_whole_update(database, late, present):
    stock(database, 1)
    stock(database, 2)
    rows = Stock.objects.using(database)
    present.fence(rows.filter(article=2)).update(count=20)
    with pytest.raises(StaleToken):
        late.fence(rows.all()).update(count=30)
    assert stocks(database) == [(10, 0), (20, present.token)]


def test_the_token_of_a_row_that_does_not_match_does_not_matter(database, late, present):
    stock(database, 1)
    stock(database, 2)
    rows = Stock.objects.using(database)
    present.fence(rows.filter(article=2)).update(count=20)
    assert late.fence(rows.filter(article=1)).update(count=30) == 1


def test_a_holder_may_write_several_times(database, present):
    stock(database)
    fenced = present.fence(Stock.objects.using(database))
    assert [fenced.update(count=n) for n in (1, 1, 2)] == [1, 1, 1]
    assert present.fence(Stock.objects.using(database).none()).update(count=3) == 0


def test_a_refused_write_leaves_the_callers_transaction_usable(database, late, present):
    stock(database)
    rows = Stock.objects.using(database)
    present.fence(rows).update(count=20)
    with transaction.atomic(using=database):
        stock(database, 2)
        with pytest.raises(StaleToken):
            late.fence(rows.filter(article=1)).update(count=30)
    assert stocks(database) == [(20, present.token), (10, 0)]


def shelves(using: str) -> Any:
    shelf = Shelf.objects.using(using).create(name="oak")
    fridge = Fridge.objects.using(using).create(name="cold")
    box = Box.objects.using(using).create(shelf=shelf)
    return shelf, fridge, box


def test_columns_in_several_tables_are_written(tables, present):
    shelves(tables)
    rows = Fridge.objects.using(tables).filter(degrees=4)
    assert present.fence(rows).update(degrees=F("degrees") + 3, room="cellar") == 1
    assert Fridge.objects.using(tables).values_list("degrees", "room", "fence").get() == (
        *(7, "cellar"),
        present.token,
    )
    assert present.fence(Fridge.objects.using(tables)).update() == 1


def test_conditions_on_other_tables_apply(tables, present):
    shelves(tables)
    rows = Box.objects.using(tables)
    assert present.fence(rows.filter(shelf__name="oak")).update(label="a") == 1
    assert present.fence(rows.filter(shelf__name="elm")).update(label="b") == 0
    assert rows.values_list("label", "fence").get() == ("a", present.token)


def within(tables: str, name: str) -> tuple[Any, dict[str, Any]]:
    """Rows and new values, for each way in which Django builds an UPDATE of them."""
    rows: dict[str, tuple[Any, dict[str, Any]]] = {
        "one table": (Shelf.objects.filter(room="hall"), {"name": "late"}),
        "another table": (Box.objects.filter(shelf__room="hall"), {"label": "late"}),
        "several tables": (Fridge.objects.filter(degrees=4), {"degrees": 9, "name": "late"}),
        "a subquery": (
            Box.objects.filter(shelf__in=Shelf.objects.filter(room="hall")),
            {"label": "late"},
        ),
        "distinct": (Shelf.objects.filter(room="hall").distinct(), {"name": "late"}),
    }
    found, values = rows[name]
    return found.using(tables), values


@pytest.mark.parametrize(
    "shape", ["one table", "another table", "several tables", "a subquery", "distinct"]
)
def test_g3_a_late_update_that_waited_for_the_newer_one_is_refused(tables, late, present, shape):
    """Every kind of statement must check the condition again after the wait."""
    shelves(tables)
    rows, values = within(tables, shape)
    raised: list[BaseException] = []

    def write() -> None:
        try:
            late.fence(rows).update(**values)
        except StaleToken as error:
            raised.append(error)
        finally:
            connections[tables].close()

    writing = threading.Thread(target=write)
    with transaction.atomic(using=tables):
        present.fence(rows.all()).update()
        writing.start()
        wait_until_one_waits(tables, over=lambda: not writing.is_alive())
        assert not raised
    writing.join()
    assert [type(error) for error in raised] == [StaleToken]
    assert "late" not in [value for row in rows.values_list(*values) for value in row]


def test_g3_an_old_snapshot_does_not_hide_the_newer_token(mariadb_alias, late, present):
    """Under REPEATABLE READ, MySQL's default, a plain read sees the row as it was before."""
    row = stock(mariadb_alias)

    def write() -> None:
        present.fence(row).save()
        connections[mariadb_alias].close()

    with connections[mariadb_alias].cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    rows = Stock.objects.using(mariadb_alias)
    try:
        with transaction.atomic(using=mariadb_alias):
            assert rows.get().fence == 0
            writing = threading.Thread(target=write)
            writing.start()
            writing.join()
            assert rows.get().fence == 0
            with pytest.raises(StaleToken):
                late.fence(rows).update(count=30)
    finally:
        connections[mariadb_alias].close()


def test_rows_are_deleted_only_if_all_accept_the_token(tables, late, present):
    shelves(tables)
    rows = Shelf.objects.using(tables)
    present.fence(rows.filter(name="oak")).update()
    with pytest.raises(StaleToken):
        late.fence(rows.all()).delete()
    assert rows.count() == 2
    assert present.fence(Fridge.objects.using(tables)).delete() == (
        2,
        {"shop.Fridge": 1, "shop.Shelf": 1},
    )


# -- instances -------------------------------------------------------------------------


def test_a_saved_instance_has_the_token(database, present):
    row = stock(database)
    row.count = 9
    present.fence(row).save()
    assert row.fence == present.token
    assert stocks(database) == [(9, present.token)]


def test_a_saved_instance_is_not_read_again(database, present):
    row = stock(database)
    present.fence(row).save()
    assert row.get_deferred_fields() == set()


def test_only_the_named_fields_are_saved(database, present):
    row = stock(database)
    row.count, row.article = 9, 99
    present.fence(row).save(update_fields=["count"])
    row.refresh_from_db()
    assert (row.count, row.article, row.fence) == (9, 1, present.token)


def test_an_expression_is_saved(database, present):
    row = stock(database)
    row.count = F("count") + 1
    present.fence(row).save()
    assert stocks(database) == [(11, present.token)]


def test_g3_a_late_save_is_refused(database, late, present):
    row = stock(database)
    other = Stock.objects.using(database).get()
    present.fence(other).save()
    row.count = 30
    with pytest.raises(StaleToken):
        late.fence(row).save()
    # The instance is unchanged, because the caller may read it or save it again.
    assert row.fence == 0
    assert stocks(database) == [(10, present.token)]


def test_a_new_instance_is_inserted_with_the_token(database, present):
    row = Stock(article=1)
    present.fence(row).save(using=database)
    assert stocks(database) == [(0, present.token)]


def test_a_new_instance_with_the_key_of_a_row_is_compared_with_it(database, late, present):
    row = stock(database)
    present.fence(row).save()
    with pytest.raises(StaleToken):
        late.fence(Stock(pk=row.pk, article=1, count=30)).save(using=database)
    present.fence(Stock(pk=row.pk, article=1, count=40)).save(using=database)
    assert stocks(database) == [(40, present.token)]


def test_a_row_that_vanished_is_not_inserted_again(database, present):
    row = stock(database)
    Stock.objects.using(database).all().delete()
    with pytest.raises(Stock.DoesNotExist, match="deleted meanwhile"):
        present.fence(row).save()
    assert stocks(database) == []


def test_a_child_model_is_saved_with_the_token_in_its_parents_table(tables, late, present):
    fridge = shelves(tables)[1]
    fridge.degrees = 7
    fridge.name = "cooler"
    present.fence(fridge).save()
    again = Fridge.objects.using(tables).get()
    assert (again.degrees, again.name, again.fence) == (7, "cooler", present.token)
    with pytest.raises(StaleToken):
        late.fence(again).save(update_fields=["degrees"])
    new = Fridge(name="new")
    present.fence(new).save(using=tables)
    assert Shelf.objects.using(tables).get(name="new").fence == present.token


def test_an_instance_with_deferred_fields_is_saved(database, present):
    stock(database)
    row = Stock.objects.using(database).only("count").get()
    row.count = 9
    present.fence(row).save()
    assert stocks(database) == [(9, present.token)]


def test_an_instance_is_deleted_only_if_it_accepts_the_token(database, late, present):
    row = stock(database)
    present.fence(row).save()
    with pytest.raises(StaleToken):
        late.fence(row).delete()
    assert present.fence(row).delete() == (1, {"shop.Stock": 1})


# -- the grant -------------------------------------------------------------------------


def test_a_fence_needs_a_lease(present):
    with pytest.raises(NotHeld, match="cannot be fenced"):
        Lock("other", using="local").fence(Stock.objects.all())
    with pytest.raises(NotHeld):
        Lock("other", using="local").atomic()


def test_a_fence_ends_with_its_lease(database, present):
    row = stock(database)
    rows, one = present.fence(Stock.objects.using(database)), present.fence(row)
    present.release()
    assert present.acquire(blocking=False)
    # Do not use the new token: the change was decided under the old one.
    for write in (lambda: rows.update(count=1), rows.delete, one.save, one.delete):
        with pytest.raises(NotHeld):
            write()
    assert stocks(database) == [(10, 0)]


def lose(lock: Lock) -> None:
    lease_of(lock).lose("expired")


def test_g2_a_write_is_rolled_back_if_the_lease_ends_meanwhile(database, present):
    row = stock(database)

    def sleep(*args: object, **facts: object) -> None:
        lose(present)

    models.signals.post_save.connect(sleep, sender=Stock)
    try:
        with pytest.raises(LeaseLost):
            present.fence(row).save()
    finally:
        models.signals.post_save.disconnect(sleep, sender=Stock)
    assert row.fence == 0
    assert stocks(database) == [(10, 0)]
    with pytest.raises(LeaseLost):
        present.fence(row)


# -- values that can be fenced ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "field", "message"),
    [
        (Order.objects.all(), None, "shop.Order has no FencingTokenField; add one"),
        (Order(), None, "shop.Order has no FencingTokenField; add one"),
        (Stock.objects.all(), "count", "no FencingTokenField 'count'; it has 'fence'"),
        (Door(), None, "several FencingTokenFields; choose one with field=: 'inside', 'outside'"),
        (Stock, None, "a queryset, a manager or a model instance, not <class"),
    ],
)
def test_the_error_says_why_a_value_cannot_be_fenced(target, field, message, present):
    with pytest.raises(TypeError, match=message):
        present.fence(target, field)


def test_one_of_several_fields_can_be_chosen(tables, present):
    Door.objects.using(tables).create()
    other = holder("other")
    present.fence(Door.objects.db_manager(tables), field="inside").update(colour="red")
    other.fence(Door.objects.using(tables).get(), "outside").save()
    door = Door.objects.using(tables).get()
    assert (door.inside, door.outside) == (present.token, other.token)


def test_the_caller_cannot_write_the_token(present):
    with pytest.raises(TypeError, match=r"The fence sets shop.Stock.fence"):
        present.fence(Stock.objects.all()).update(fence=1)


def test_a_slice_is_refused_as_django_refuses_it(present):
    with pytest.raises(TypeError, match="slice"):
        present.fence(Stock.objects.all()[:1]).update(count=1)


async def test_coroutines_can_write(present):
    row = await Stock.objects.acreate(article=1)
    assert await present.fence(Stock.objects.all()).aupdate(count=1) == 1
    await present.fence(row).asave()
    assert await Stock.objects.values_list("count", "fence").aget() == (0, present.token)
    assert await present.fence(row).adelete() == (1, {"shop.Stock": 1})
    assert (await present.fence(Stock.objects.all()).adelete())[0] == 0


# -- the field -------------------------------------------------------------------------


def test_g3_a_plain_save_never_lowers_the_token(database, present):
    row = stock(database)
    present.fence(Stock.objects.using(database)).update(count=20)
    row.save()
    assert stocks(database) == [(10, present.token)]
    row.fence = present.token + 1
    row.save()
    assert stocks(database) == [(10, present.token + 1)]


def test_rows_inserted_without_the_column_begin_at_0(database):
    with connections[database].cursor() as cursor:
        cursor.execute("INSERT INTO shop_stock (article, count) VALUES (1, 2)")
    assert stocks(database) == [(2, 0)]


def test_migrations_import_the_field_from_its_public_module():
    field = FencingTokenField()
    assert (field.default, field.editable, field.null) == (0, False, False)
    assert field.deconstruct()[1:] == ("django_dlock.FencingTokenField", [], {})
    assert MigrationWriter.serialize(field)[0] == "django_dlock.FencingTokenField()"
    assert FencingTokenField(editable=True, verbose_name="x").deconstruct()[3] == {
        "editable": True,
        "verbose_name": "x",
    }
    assert isinstance(field.clone(), django_dlock.FencingTokenField)


def test_a_field_that_may_be_null_is_refused():
    with pytest.raises(TypeError, match="cannot be null"):
        FencingTokenField(null=True)
