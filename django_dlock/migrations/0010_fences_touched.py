from typing import Any

from django.db import migrations, models

from django_dlock.database_time import Now


def touch(apps: Any, schema_editor: Any) -> None:
    """Until now the clocks of the holders wrote the time, which may be far behind."""
    fences = apps.get_model("django_dlock", "Fence").objects
    fences.using(schema_editor.connection.alias).update(updated_at=Now())


class Migration(migrations.Migration):
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
        migrations.RunPython(touch, migrations.RunPython.noop, elidable=True),
    ]
