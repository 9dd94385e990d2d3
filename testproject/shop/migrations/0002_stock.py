from django.db import migrations, models

import django_dlock


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="Stock",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("article", models.PositiveIntegerField(unique=True)),
                ("count", models.IntegerField(default=0)),
                ("fence", django_dlock.FencingTokenField()),
            ],
        ),
    ]
