"""The fields of a request's body: of a form, or of a JSON object."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest
from django.http.request import RawPostDataException

__all__ = ["FORMS", "digest_of_file", "values_of"]

ABSENT = object()
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


def values_of(request: HttpRequest, names: Sequence[str]) -> dict[str, Any]:
    """The values of the fields that the body has; of a form, each is a list.

    Reads uploads, too. A body that is no form is read as JSON, whatever type it is said to have.

    Args:
        names: A dot leads into an object or list, unless a field has the whole name.
    """
    # REST framework passes its views a wrapper around Django's request.
    whole = getattr(request, "_request", request)
    if whole.content_type in FORMS and whole.method == "POST":
        return {
            name: [*whole.POST.getlist(name), *map(_of_file, whole.FILES.getlist(name))]
            for name in names
            if name in whole.POST or name in whole.FILES
        }
    content = _json(request, whole)
    found = {name: _inside(content, name) for name in names}
    return {name: value for name, value in found.items() if value is not ABSENT}


def _json(request: Any, whole: HttpRequest) -> Any:
    """What the body says as JSON; ``None`` if it is none."""
    try:
        body = whole.body
    except RawPostDataException:
        # REST framework has read it as a stream, and keeps what it said.
        return getattr(request, "data", None)
    try:
        return json.loads(body)
    except (RecursionError, ValueError):
        return None


def _inside(content: Any, name: str) -> Any:
    """The value of a field, or ``ABSENT``."""
    if isinstance(content, Mapping) and name in content:
        return content[name]
    first, dot, rest = name.partition(".")
    found: Any = ABSENT
    if isinstance(content, Mapping):
        found = content.get(first, ABSENT)
    elif isinstance(content, list) and re.fullmatch(r"[0-9]{1,9}", first):
        found = dict(enumerate(content)).get(int(first), ABSENT)
    return _inside(found, rest) if dot else found


def _of_file(file: UploadedFile[Any]) -> list[str]:
    return [file.name or "", digest_of_file(file).hex()]


def digest_of_file(file: UploadedFile[Any]) -> bytes:
    """A digest of the content of an upload, which can be read again after this."""
    content = hashlib.sha256()
    for chunk in file.chunks():
        content.update(chunk)
    file.seek(0)
    return content.digest()
