from typing import Any

from django.db import migrations, models

from django_dlock.databases.time import Now

BATCH = 1000


def touch(apps: Any, schema_editor: Any) -> None:
    """Until now the clocks of the holders wrote the time, which may be far behind.

    In batches of one transaction each, because holders wait for rows that are locked.
    """
    fences = apps.get_model("django_dlock", "Fence").objects.using(schema_editor.connection.alias)
    after = fences
    while keys := list(after.order_by("pk").values_list("pk", flat=True)[:BATCH]):
        fences.filter(pk__in=keys).update(updated_at=Now())
        after = fences.filter(pk__gt=keys[-1])


class Migration(migrations.Migration):
    # Else one transaction would hold the locks of all batches.
    atomic = False

    dependencies = [("django_dlock", "0009_results_and_forgotten")]

    operations = [
        migrations.AlterField(
            model_name="fence",
            name="updated_at",
            field=models.DateTimeField(
                help_text="When a holder last wrote it, by the database's clock.",
                verbose_name="updated at",
            ),
        ),
        migrations.RunPython(
            touch,
            migrations.RunPython.noop,
            # Where routers allow no such table, there is none.
            hints={"model_name": "fence"},
            elidable=True,
        ),
    ]
