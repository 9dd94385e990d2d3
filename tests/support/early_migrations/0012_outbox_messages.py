from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [
        ("django_dlock", "0011_failover_in_a_row"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="followup",
            options={
                "default_permissions": ("view",),
                "permissions": (("publish_followup", "Can publish outbox message"),),
                "verbose_name": "outbox message",
                "verbose_name_plural": "outbox messages",
            },
        ),
    ]
