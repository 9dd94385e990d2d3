from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="HeldLock",
            fields=[
                (
                    "name",
                    models.CharField(
                        max_length=255, primary_key=True, serialize=False, verbose_name="name"
                    ),
                ),
                ("alias", models.CharField(max_length=255, verbose_name="alias")),
            ],
            options={
                "verbose_name": "held lock",
                "verbose_name_plural": "held locks",
                "permissions": (("release_heldlock", "Can release held lock"),),
                "managed": False,
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="IdempotencyRecord",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("digest", models.CharField(editable=False, max_length=64, unique=True)),
                ("scope", models.CharField(max_length=255, verbose_name="scope")),
                ("key", models.CharField(max_length=255, verbose_name="key")),
                (
                    "payload",
                    models.CharField(
                        help_text="The same key with another payload is an error.",
                        max_length=64,
                        verbose_name="payload fingerprint",
                    ),
                ),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("running", "running"),
                            ("waiting", "waiting"),
                            ("succeeded", "succeeded"),
                            ("failed", "failed"),
                        ],
                        db_index=True,
                        max_length=16,
                        verbose_name="state",
                    ),
                ),
                (
                    "attempt",
                    models.PositiveIntegerField(
                        help_text="Increases with every run; only the latest run can complete the record.",
                        verbose_name="attempt",
                    ),
                ),
                (
                    "deaths",
                    models.PositiveIntegerField(
                        default=0,
                        help_text="Runs that died in the middle since the last outcome.",
                        verbose_name="deaths",
                    ),
                ),
                (
                    "lock_alias",
                    models.CharField(
                        blank=True, default="", max_length=255, verbose_name="lock alias"
                    ),
                ),
                (
                    "lock_name",
                    models.CharField(
                        blank=True, default="", max_length=255, verbose_name="lock name"
                    ),
                ),
                (
                    "owner",
                    models.CharField(
                        help_text="Owner of the latest run's lease.",
                        max_length=255,
                        verbose_name="owner",
                    ),
                ),
                (
                    "token",
                    models.BigIntegerField(blank=True, null=True, verbose_name="fencing token"),
                ),
                (
                    "task_id",
                    models.CharField(
                        blank=True, default="", max_length=255, verbose_name="task id"
                    ),
                ),
                (
                    "result",
                    models.TextField(
                        blank=True,
                        default="",
                        help_text="Empty if none was stored.",
                        verbose_name="result",
                    ),
                ),
                ("error", models.TextField(blank=True, default="", verbose_name="error")),
                ("created_at", models.DateTimeField(verbose_name="created at")),
                ("started_at", models.DateTimeField(verbose_name="started at")),
                (
                    "finished_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="finished at"),
                ),
                ("expires_at", models.DateTimeField(db_index=True, verbose_name="expires at")),
            ],
            options={
                "verbose_name": "idempotency record",
                "verbose_name_plural": "idempotency records",
                "permissions": (("forget_idempotencyrecord", "Can forget idempotency record"),),
                "default_permissions": ("view",),
                "indexes": [models.Index(fields=["scope", "key"], name="dlock_record_key")],
            },
        ),
        migrations.CreateModel(
            name="LockEvent",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("when", models.DateTimeField(db_index=True, verbose_name="when")),
                (
                    "event",
                    models.CharField(
                        choices=[
                            ("lost", "lost"),
                            ("taken_over", "taken over"),
                            ("broken", "broken"),
                            ("max_hold", "max_hold reached"),
                            ("long_wait", "long wait"),
                        ],
                        max_length=16,
                        verbose_name="event",
                    ),
                ),
                ("alias", models.CharField(max_length=255, verbose_name="alias")),
                ("name", models.CharField(max_length=255, verbose_name="name")),
                (
                    "owner",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="owner"),
                ),
                (
                    "token",
                    models.BigIntegerField(blank=True, null=True, verbose_name="fencing token"),
                ),
                (
                    "reason",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="reason"),
                ),
                (
                    "user",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="user"),
                ),
                ("detail", models.JSONField(blank=True, default=dict, verbose_name="detail")),
            ],
            options={
                "verbose_name": "lock event",
                "verbose_name_plural": "lock events",
                "ordering": ("-when", "-id"),
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["name", "when"], name="dlock_event_name"),
                    models.Index(fields=["event", "when"], name="dlock_event_event"),
                ],
            },
        ),
    ]
