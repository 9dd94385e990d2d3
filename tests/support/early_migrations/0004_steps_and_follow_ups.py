import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_dlock", "0003_record_indexes"),
    ]

    operations = [
        migrations.AddField(
            model_name="idempotencyrecord",
            name="ending",
            field=models.CharField(
                blank=True,
                choices=[
                    ("returned", "returned"),
                    ("ignored", "ignored"),
                    ("replaced", "replaced"),
                ],
                db_default="",
                default="",
                help_text="How the successful run ended; “replaced” while its replacement runs.",
                max_length=16,
                verbose_name="ending",
            ),
        ),
        migrations.AddField(
            model_name="idempotencyrecord",
            name="step",
            field=models.PositiveIntegerField(
                db_default=0,
                default=0,
                help_text="How often the task had replaced itself before the latest run.",
                verbose_name="step",
            ),
        ),
        migrations.CreateModel(
            name="FollowUp",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("task", models.CharField(max_length=255, verbose_name="task")),
                ("task_id", models.CharField(max_length=255, verbose_name="task id")),
                (
                    "message",
                    models.TextField(
                        help_text="Arguments and options, as JSON.", verbose_name="message"
                    ),
                ),
                (
                    "error",
                    models.TextField(
                        blank=True,
                        default="",
                        help_text="Why the last attempt to publish failed.",
                        verbose_name="error",
                    ),
                ),
                ("created_at", models.DateTimeField(verbose_name="created at")),
                (
                    "published_at",
                    models.DateTimeField(
                        blank=True,
                        help_text="Empty as long as it is pending.",
                        null=True,
                        verbose_name="published at",
                    ),
                ),
                ("expires_at", models.DateTimeField(verbose_name="expires at")),
                (
                    "record",
                    models.ForeignKey(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="follow_ups",
                        to="django_dlock.idempotencyrecord",
                        verbose_name="idempotency record",
                    ),
                ),
            ],
            options={
                "verbose_name": "follow-up",
                "verbose_name_plural": "follow-ups",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["published_at", "expires_at"], name="dlock_followup_due")
                ],
            },
        ),
    ]
