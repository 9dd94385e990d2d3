"""Keys of views that are lists of arguments of the URL and of fields of the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..keys import SHOWN, root_of, value_of
from ..keys.arguments import Arguments
from ..keys.digests import Digest
from ..keys.template_secrets import secret_in


class FieldsDigest(Digest):
    """The digest of a request: a list of arguments of the URL and of fields of the request.

    What is named must be there, or requests without it would share a key.
    """

    def check(self, name: str, arguments: Arguments, where: str) -> None:
        arguments.check(root_of(name), where)
        if name == "request":
            raise ValueError(
                f"{arguments.what}: {where} names the request, which has no stable form; name a "
                "field of it, such as 'request.user.pk'"
            )
        if secret := secret_in(name):
            raise ValueError(f"{arguments.what}: the field {name!r} is {secret}, {SHOWN}")

    def chosen(self, names: Sequence[str], flat: Mapping[str, Any]) -> Mapping[str, Any]:
        optional = self.arguments.signature.parameters
        found = {}
        for name in names:
            if name in flat:
                found[name] = flat[name]
            elif name not in optional:
                where = f"{self.arguments.what}: the field {{{name}}}"
                found[name] = value_of(name, flat, where)
        return found
