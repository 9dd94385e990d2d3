"""Whose traces are to be erased, and how they are recognised.

A name or a key may contain the value itself, or a digest of it. Digests are made again, by the same
functions, and then looked for.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from django.contrib.auth import get_user_model
from django.db import models

from ... import tenancy
from ...keys import keyed_digests
from ...keys.digests import fingerprint
from ...keys.views import beginning_of_key, lock_name_of, record_key
from ...models import IdempotencyRecord
from ...text.names import DIGEST_LENGTH, fit

_DIGEST = re.compile(f"(?<![0-9a-f])[0-9a-f]{{{DIGEST_LENGTH}}}(?![0-9a-f])")


class Criterion(NamedTuple):
    """One thing that was asked for.

    Attributes:
        option: ``name``, ``key``, ``user`` or ``argument``.
    """

    option: str
    value: str

    def __str__(self) -> str:
        return f"--{self.option} {self.value!r}"


class Subject:
    """All that was asked for; a trace belongs to it if one of the criteria fits.

    With ``DLOCK_SCOPE``, only what belongs to the active tenant does: another one has another user
    with the same primary key. Without an active tenant, that is what belongs to no tenant; but
    then names are compared with the full names of all.

    Args:
        names: Names of locks; ``*`` matches anything.
        keys: Keys of records, values of the ``Idempotency-Key`` header, or values of which a key
            or a name contains the ``keyed_digest()``, or the digest of a single argument.
        users: Their user names; or primary keys, if their rows are gone.
        arguments: All arguments of which one digest is made, by name.
        argument_names: What the single argument of a digest may be called.
    """

    def __init__(
        self,
        *,
        names: Sequence[str] = (),
        keys: Sequence[str] = (),
        users: Sequence[str] = (),
        arguments: Mapping[str, str] | None = None,
        argument_names: Iterable[str] = (),
    ) -> None:
        self.criteria = {
            *(Criterion("name", name) for name in names),
            *(Criterion("key", key) for key in keys),
            *(Criterion("user", user) for user in users),
        }
        self._tenant = tenancy.current()
        self.users = {user: Criterion("user", user) for user in users}
        self._patterns = [(_pattern(name), Criterion("name", name)) for name in names]
        self._keys = {key: Criterion("key", key) for key in keys}
        self._exact = {fit(key): criterion for key, criterion in self._keys.items()}
        self._digests: dict[str, Criterion] = {}
        self._clients = {client: self.users[user] for user in users for client in _clients_of(user)}
        # The names of the locks of records that were found; they are digests of scope and key.
        self._of_records: dict[str, Criterion] = {}
        argument_names = list(argument_names)
        for client, criterion in self._clients.items():
            # Of a key that is the list ``["request.user.pk"]``.
            made = _fingerprints({"request.user.pk": client})
            self._digests.update(dict.fromkeys(made, criterion))
        for key, criterion in self._keys.items():
            self._digests.update(dict.fromkeys(keyed_digests(key) if key else (), criterion))
            for name in argument_names:
                self._digests.update(dict.fromkeys(_fingerprints({name: key}), criterion))
        if arguments:
            text = " ".join(f"{name}={value}" for name, value in arguments.items())
            criterion = Criterion("argument", text)
            self.criteria.add(criterion)
            self._digests.update(dict.fromkeys(_fingerprints(arguments), criterion))

    # -- what fits ---------------------------------------------------------------------

    def in_name(self, name: str) -> set[Criterion]:
        """The criteria that a lock's name fits."""
        own, rest = self._split(name)
        if not own:
            return set() if self._tenant else self._matching(name)
        found = self.in_group(rest) | self._matching(name)
        if name in self._of_records:
            found.add(self._of_records[name])
        return found

    def in_group(self, group: str) -> set[Criterion]:
        """The criteria that a name fits from which the tenant was taken away."""
        return self.in_key(group) | self._matching(group)

    def _matching(self, name: str) -> set[Criterion]:
        return {criterion for matches, criterion in self._patterns if matches(name)}

    def _split(self, full: str) -> tuple[bool, str]:
        """Whether a full name or scope belongs to the active tenant, and the rest of it."""
        tenant, rest = tenancy.split(full)
        return tenant == self._tenant, rest

    def in_key(self, key: str) -> set[Criterion]:
        """The criteria that a key fits, whatever its scope."""
        found = {self._digests[each] for each in _DIGEST.findall(key) if each in self._digests}
        if key in self._keys or key in self._exact:
            found.add(self._keys.get(key) or self._exact[key])
        return found

    def in_record(self, record: IdempotencyRecord) -> set[Criterion]:
        """The criteria that a record fits; also notes the name of its lock."""
        found = self.in_name(record.lock_name)
        if not self._split(record.scope)[0]:
            return found
        found |= self.in_key(record.key)
        if _is_of_view(record.lock_name, record.scope, record.key):
            found |= self._in_key_of_view(record.key)
            self._of_records.update((record.lock_name, criterion) for criterion in found)
        return found

    def in_detail(self, detail: Mapping[str, Any], lock_name: str) -> set[Criterion]:
        """The criteria that a lock event about a record fits, which may be gone by now."""
        scope, key = detail.get("scope"), detail.get("key")
        if not isinstance(scope, str) or not isinstance(key, str) or not self._split(scope)[0]:
            return set()
        found = self.in_key(key)
        if _is_of_view(lock_name, scope, key):
            found |= self._in_key_of_view(key)
        return found

    def in_text(self, text: str) -> set[Criterion]:
        """The criteria that the ``str()`` of a record fits; a scope may contain ``": "``, too."""
        if not self._split(text)[0]:
            return set()
        parts = text.split(": ")
        keys = [": ".join(parts[place:]) for place in range(1, len(parts))]
        return set().union(*(self.in_key(key) | self._in_key_of_view(key) for key in keys))

    def _in_key_of_view(self, key: str) -> set[Criterion]:
        """``key`` is the client, a slash, and the value of the header; or a digest of that."""
        _, slash, header = key.partition("/")
        found = {self._keys[header]} if slash and header in self._keys else set()
        for client, criterion in self._clients.items():
            if key.startswith(beginning_of_key(client)):
                found.add(criterion)
        for client, sent in itertools.product(self._clients, self._keys):
            if key == record_key(client, sent):
                found |= {self._clients[client], self._keys[sent]}
        return found

    # -- what a database is asked for --------------------------------------------------

    def names(self, field: str) -> Iterator[models.Q]:
        """Conditions of which one holds for each name that fits, and for some others.

        Some databases ignore the case of letters, so what they find is compared again.
        """
        yield from self.keys(field)
        if self._tenant and self._keys:
            full = [tenancy.prefixed(self._tenant, key) for key in (*self._keys, *self._exact)]
            yield models.Q(**{f"{field}__in": full})
        for _, criterion in self._patterns:
            longest = max(criterion.value.split("*"), key=len)
            yield models.Q(**{f"{field}__contains": longest})
        if self._of_records:
            yield models.Q(**{f"{field}__in": list(self._of_records)})

    def keys(self, field: str) -> Iterator[models.Q]:
        """As ``names``, for keys."""
        if self._keys:
            yield models.Q(**{f"{field}__in": [*self._keys, *self._exact]})
        for digest in self._digests:
            yield models.Q(**{f"{field}__contains": digest})

    def keys_of_views(self, field: str) -> Iterator[models.Q]:
        """As ``names``, for the keys of ``idempotent_view``."""
        for header in self._keys:
            yield models.Q(**{f"{field}__endswith": f"/{header}"})
        for client in self._clients:
            yield models.Q(**{f"{field}__startswith": beginning_of_key(client)})
            for header in self._keys:
                yield models.Q(**{field: record_key(client, header)})


def _is_of_view(lock_name: str, scope: str, key: str) -> bool:
    """Whether the lock is that of ``idempotent_view`` for the record with this full scope."""
    return tenancy.split(lock_name)[1] == lock_name_of(scope, key)


def _pattern(pattern: str) -> Any:
    """A function that tests whether a name matches; only ``*`` is special."""
    parts = (re.escape(part) for part in pattern.split("*"))
    return re.compile(".*".join(parts), re.DOTALL).fullmatch


def _clients_of(user: str) -> list[str]:
    """What ``client="{request.user.pk}"`` makes of a user."""
    model = get_user_model()
    users: models.QuerySet[Any] = models.QuerySet(model)
    found = users.filter(**{model.USERNAME_FIELD: user})
    exact = [each for each in found if each.get_username() == user]
    # If the user was deleted, the primary key is all that is left.
    return [str(each.pk) for each in exact] or [user]


def _fingerprints(arguments: Mapping[str, str]) -> Iterator[str]:
    """The digests that these arguments make, for each type that their texts may stand for."""
    readings = [list(_readings(value)) for value in arguments.values()]
    for values in itertools.product(*readings):
        made = fingerprint(dict(zip(arguments, values, strict=True)), what="erasure")
        yield made.rpartition(":")[2]


def _readings(text: str) -> Iterator[Any]:
    yield text
    for read in (json.loads, uuid.UUID, dt.date.fromisoformat, dt.datetime.fromisoformat):
        try:
            value = read(text)
        except ValueError:
            continue
        yield value
