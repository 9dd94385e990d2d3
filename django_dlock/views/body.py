"""The fields of a request's body: of a form, or of a JSON object."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest
from django.http.request import RawPostDataException
from django.utils.datastructures import MultiValueDict

from .wrapped import unwrapped

ABSENT = object()
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


def values_of(request: HttpRequest, names: Sequence[str]) -> dict[str, Any]:
    """The values of the fields that the body has; of a form, each is a tuple.

    Reads uploads, too. A body that is no form is read as JSON, whatever type it is said to have,
    and then as REST framework does, below it.

    Args:
        names: A dot leads into an object or list, unless a field has the whole name.
    """
    whole = unwrapped(request)
    if whole.content_type in FORMS and whole.method == "POST":
        return _of_form(names, whole.POST, whole.FILES)
    content = _content(request, whole)
    if isinstance(content, MultiValueDict):
        # REST framework also reads forms of other methods than POST.
        return _of_form(names, content)
    found = {name: _inside(content, name) for name in names}
    return {name: value for name, value in found.items() if value is not ABSENT}


def _of_form(names: Sequence[str], *parts: MultiValueDict[str, Any]) -> dict[str, Any]:
    found = {
        name: tuple(
            _of_file(value) if isinstance(value, UploadedFile) else value
            for part in parts
            for value in part.getlist(name)
        )
        for name in names
    }
    return {name: values for name, values in found.items() if values}


def _content(request: Any, whole: HttpRequest) -> Any:
    """What the body says; ``None`` if nothing can read it."""
    try:
        body = whole.body
    except RawPostDataException:
        # REST framework has read it as a stream, and keeps what it said.
        return getattr(request, "data", None)
    content = None
    with suppress(RecursionError, ValueError):
        content = json.loads(body)
    if isinstance(content, dict | list):
        return content
    return getattr(request, "data", None)


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
