"""The arguments of one call, by the signature of its function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any


class Arguments:
    """The signature from whose arguments a key is made."""

    def __init__(self, signature: inspect.Signature, what: str) -> None:
        self.signature = signature
        self.what = what
        self.names = list(signature.parameters)
        kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
        self.rest = kinds.get(inspect.Parameter.VAR_KEYWORD)

    def check(self, name: str, where: str) -> None:
        """Refuse a name that no call can pass."""
        if name not in self.names and self.rest is None:
            known = ", ".join(self.names) or "none"
            raise ValueError(
                f"{self.what}: {where} names the argument {name!r}, which does not exist; "
                f"known arguments: {known}"
            )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.what}: {error}") from None

    def named(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Every argument by its name, including those in ``**kwargs``."""
        if self.rest is None:
            return bound.arguments
        return {**bound.arguments.get(self.rest, {}), **bound.arguments}
