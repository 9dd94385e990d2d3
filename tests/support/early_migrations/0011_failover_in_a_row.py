from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_dlock", "0010_fences_touched"),
    ]

    operations = [
        migrations.AddField(
            model_name="failoverrecord",
            name="in_a_row",
            field=models.IntegerField(db_default=0, default=0),
        ),
    ]
