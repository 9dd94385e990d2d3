"""``{% idempotency_key %}``: the hidden field of a form for ``idempotent_view``.

In Jinja2, add the function to the environment: ``environment.globals["idempotency_key"]``.
"""

from __future__ import annotations

import uuid

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..views.idempotency_key import DEFAULT_FIELD

register = template.Library()


@register.simple_tag
def idempotency_key(name: str = DEFAULT_FIELD) -> SafeString:
    """A hidden field with a new key, the same for all clicks on one page.

    Args:
        name: Of the field; what ``BodyField`` of the view is given.
    """
    return format_html('<input type="hidden" name="{}" value="{}">', name, uuid.uuid4().hex)
