"""``FencingTokenField``: stores the highest token that has written a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models.functions import Greatest

__all__ = ["FencingTokenField"]

if TYPE_CHECKING:
    _Base = models.BigIntegerField[int, int]
else:
    _Base = models.BigIntegerField

_OURS = {"default": 0, "db_default": 0, "editable": False}


class FencingTokenField(_Base):
    """The highest fencing token that has written the row; 0 if none has.

    ``lock.fence(...)`` writes it. Tokens of different locks cannot be compared, so a field
    belongs to one lock name; rows that are guarded by two locks need two fields.

    ``save()`` never lowers it, even if the instance was loaded before the last fenced write. The
    default is also set in the database, so that code which does not know the column can insert
    rows during a rolling deploy.

    Raises:
        TypeError: ``null=True``; an unknown token cannot be compared.
    """

    description = "Fencing token"

    def __init__(self, *args: Any, **options: Any) -> None:
        if options.get("null"):
            raise TypeError("FencingTokenField cannot be null; it is 0 until a token is written")
        super().__init__(*args, **{**_OURS, **options})

    def deconstruct(self) -> tuple[str, str, Any, Any]:
        name, _, args, options = super().deconstruct()
        for option, ours in _OURS.items():
            value = getattr(self, option)
            if value == ours:
                options.pop(option, None)
            else:
                options[option] = value
        # The public import path, because the module may move.
        return name, "django_dlock.FencingTokenField", args, options

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        value = super().pre_save(model_instance, add)
        if add or hasattr(value, "resolve_expression"):
            return value
        # The instance may have been loaded before a newer holder wrote.
        return Greatest(models.F(self.attname), models.Value(value, output_field=self))
