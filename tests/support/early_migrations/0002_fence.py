from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("django_dlock", "0001_initial")]

    operations = [
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
                        help_text="According to the clock of the last holder.",
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
    ]
