from typing import Any

import django.db.models.deletion
from django.db import migrations, models


def leave_room(apps: Any, schema_editor: Any) -> None:
    """Let PostgreSQL keep the versions of a row on one page: a lease is written twice per cycle."""
    if schema_editor.connection.vendor == "postgresql":
        for name, percent in (("IdempotencyRecord", 75), ("LeaseRecord", 70)):
            table = schema_editor.quote_name(apps.get_model("django_dlock", name)._meta.db_table)
            # Routers may have allowed only one of the two.
            schema_editor.execute(f"ALTER TABLE IF EXISTS {table} SET (fillfactor = {percent})")


def compare_exactly(apps: Any, schema_editor: Any) -> None:
    """Let MySQL tell case and accents apart, and take any character; the others always do."""
    if schema_editor.connection.vendor == "mysql":
        for name in ("LeaseRecord", "ProcessRecord"):
            table = schema_editor.quote_name(apps.get_model("django_dlock", name)._meta.db_table)
            schema_editor.execute(
                f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
            )


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
            name="FailoverRecord",
            fields=[
                (
                    "id",
                    models.CharField(
                        editable=False, max_length=64, primary_key=True, serialize=False
                    ),
                ),
                ("alias", models.CharField(max_length=255, verbose_name="alias")),
                ("key_prefix", models.CharField(max_length=255, verbose_name="key prefix")),
                ("epoch", models.IntegerField(verbose_name="epoch")),
                ("active", models.CharField(max_length=255, verbose_name="active store")),
                ("longest", models.BigIntegerField()),
                ("quiet", models.BigIntegerField()),
                ("switched_at", models.BigIntegerField(null=True)),
                ("answered_at", models.BigIntegerField()),
                (
                    "reason",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="reason"),
                ),
                (
                    "switched_by",
                    models.CharField(
                        blank=True, default="", max_length=255, verbose_name="switched by"
                    ),
                ),
                ("in_a_row", models.IntegerField(db_default=0, default=0)),
            ],
            options={
                "verbose_name": "fail-over record",
                "verbose_name_plural": "fail-over records",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Fence",
            fields=[
                (
                    "digest",
                    models.CharField(
                        editable=False, max_length=64, primary_key=True, serialize=False
                    ),
                ),
                ("alias", models.CharField(max_length=255, verbose_name="alias")),
                ("key_prefix", models.CharField(max_length=255, verbose_name="key prefix")),
                ("name", models.CharField(max_length=255, verbose_name="name")),
                ("token", models.BigIntegerField(verbose_name="fencing token")),
                (
                    "updated_at",
                    models.DateTimeField(
                        help_text="When a holder last wrote it, by the database's clock.",
                        verbose_name="updated at",
                    ),
                ),
            ],
            options={
                "verbose_name": "fence",
                "verbose_name_plural": "fences",
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="LockStatistics",
            fields=[
                (
                    "id",
                    models.CharField(
                        editable=False, max_length=32, primary_key=True, serialize=False
                    ),
                ),
                (
                    "period",
                    models.PositiveIntegerField(
                        choices=[(60, "minute"), (600, "ten minutes"), (3600, "hour")],
                        verbose_name="period",
                    ),
                ),
                ("start", models.BigIntegerField(verbose_name="start")),
                ("metric", models.CharField(max_length=64, verbose_name="metric")),
                ("alias", models.CharField(max_length=255, verbose_name="alias")),
                ("group", models.CharField(max_length=64, verbose_name="group")),
                ("label", models.CharField(max_length=64, verbose_name="label")),
                ("count", models.IntegerField(verbose_name="count")),
                ("total", models.FloatField(verbose_name="total")),
                ("highest", models.FloatField(verbose_name="highest")),
                ("bucket_0", models.IntegerField()),
                ("bucket_1", models.IntegerField()),
                ("bucket_2", models.IntegerField()),
                ("bucket_3", models.IntegerField()),
                ("bucket_4", models.IntegerField()),
                ("bucket_5", models.IntegerField()),
                ("bucket_6", models.IntegerField()),
                ("bucket_7", models.IntegerField()),
                ("bucket_8", models.IntegerField()),
                ("bucket_9", models.IntegerField()),
                ("bucket_10", models.IntegerField()),
                ("bucket_11", models.IntegerField()),
            ],
            options={
                "verbose_name": "lock statistics",
                "verbose_name_plural": "lock statistics",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="ProcessRecord",
            fields=[
                (
                    "id",
                    models.CharField(
                        editable=False, max_length=64, primary_key=True, serialize=False
                    ),
                ),
                ("seen_at", models.BigIntegerField()),
                ("gone", models.BooleanField()),
            ],
            options={
                "verbose_name": "process record",
                "verbose_name_plural": "process records",
                "default_permissions": (),
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
                    "worker",
                    models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="The worker and the process of the latest run.",
                        max_length=255,
                        verbose_name="worker",
                    ),
                ),
                (
                    "message",
                    models.TextField(
                        blank=True,
                        help_text="Task, arguments and queue of the latest run, as JSON; empty if not stored.",
                        null=True,
                        verbose_name="message",
                    ),
                ),
                (
                    "step",
                    models.PositiveIntegerField(
                        db_default=0,
                        default=0,
                        help_text="How often the task had replaced itself before the latest run.",
                        verbose_name="step",
                    ),
                ),
                (
                    "ending",
                    models.CharField(
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
                ("expires_at", models.DateTimeField(verbose_name="expires at")),
            ],
            options={
                "verbose_name": "idempotency record",
                "verbose_name_plural": "idempotency records",
                "permissions": (
                    ("forget_idempotencyrecord", "Can forget idempotency record"),
                    ("rerun_idempotencyrecord", "Can run the task of an idempotency record again"),
                    (
                        "view_results_idempotencyrecord",
                        "Can view results, answers and errors of idempotency records",
                    ),
                ),
                "default_permissions": ("view",),
                "indexes": [models.Index(fields=["scope", "id"], name="dlock_record_scope")],
            },
        ),
        migrations.CreateModel(
            name="LeaseRecord",
            fields=[
                ("id", models.UUIDField(editable=False, primary_key=True, serialize=False)),
                ("key_prefix", models.CharField(max_length=255, verbose_name="key prefix")),
                ("name", models.CharField(max_length=255, verbose_name="name")),
                ("version", models.BigIntegerField()),
                ("owner", models.CharField(max_length=512, verbose_name="owner")),
                ("kind", models.CharField(max_length=16, verbose_name="kind")),
                ("ended", models.CharField(max_length=1)),
                ("token", models.BigIntegerField(verbose_name="fencing token")),
                ("ttl", models.BigIntegerField()),
                ("granted_at", models.BigIntegerField()),
                ("ends_at", models.BigIntegerField()),
                ("renewals", models.IntegerField()),
                ("shortened", models.IntegerField()),
                ("process", models.TextField()),
                ("metadata", models.TextField()),
                ("past", models.TextField()),
                ("queue", models.TextField()),
                ("cancelled", models.TextField()),
            ],
            options={
                "verbose_name": "lease record",
                "verbose_name_plural": "lease records",
                "default_permissions": (),
                "indexes": [models.Index(fields=["key_prefix", "name"], name="dlock_lease_name")],
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
                            ("rerun", "run again"),
                            ("forgotten", "forgotten"),
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
        migrations.CreateModel(
            name="FollowUp",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("task", models.CharField(max_length=255, verbose_name="task")),
                ("task_id", models.CharField(max_length=255, verbose_name="task id")),
                (
                    "message",
                    models.TextField(
                        help_text="Arguments and options, as JSON; empty once published.",
                        verbose_name="message",
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
                "verbose_name": "outbox message",
                "verbose_name_plural": "outbox messages",
                "permissions": (("publish_followup", "Can publish outbox message"),),
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["published_at", "expires_at"], name="dlock_followup_due")
                ],
            },
        ),
        # Where routers allow none of the tables, there are none; see allow_migrate().
        migrations.RunPython(
            leave_room, migrations.RunPython.noop, hints={"model_name": "idempotencyrecord"}
        ),
        migrations.RunPython(
            leave_room, migrations.RunPython.noop, hints={"model_name": "leaserecord"}
        ),
        # MySQL cannot roll it back.
        migrations.RunPython(
            compare_exactly,
            migrations.RunPython.noop,
            atomic=False,
            hints={"model_name": "leaserecord"},
        ),
    ]
