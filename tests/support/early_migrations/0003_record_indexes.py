from typing import Any

from django.db import migrations, models


def leave_room(apps: Any, schema_editor: Any) -> None:
    """Let PostgreSQL keep the versions of a record on one page, which is filled by three quarters."""
    if schema_editor.connection.vendor == "postgresql":
        table = apps.get_model("django_dlock", "IdempotencyRecord")._meta.db_table
        schema_editor.execute(
            f"ALTER TABLE {schema_editor.quote_name(table)} SET (fillfactor = 75)"
        )


class Migration(migrations.Migration):
    dependencies = [("django_dlock", "0002_fence")]

    operations = [
        migrations.RemoveIndex(model_name="idempotencyrecord", name="dlock_record_key"),
        migrations.AlterField(
            model_name="idempotencyrecord",
            name="state",
            field=models.CharField(
                choices=[
                    ("running", "running"),
                    ("waiting", "waiting"),
                    ("succeeded", "succeeded"),
                    ("failed", "failed"),
                ],
                max_length=16,
                verbose_name="state",
            ),
        ),
        migrations.AlterField(
            model_name="idempotencyrecord",
            name="expires_at",
            field=models.DateTimeField(verbose_name="expires at"),
        ),
        migrations.AddIndex(
            model_name="idempotencyrecord",
            index=models.Index(fields=["scope", "id"], name="dlock_record_scope"),
        ),
        # The table, not its rows: nothing to undo, and nothing is locked for longer than a moment.
        migrations.RunPython(
            leave_room,
            migrations.RunPython.noop,
            # Where routers allow no such table, there is none.
            hints={"model_name": "idempotencyrecord"},
            elidable=False,
        ),
    ]
