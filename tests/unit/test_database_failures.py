"""What errors of the databases' drivers mean."""

from __future__ import annotations

import pytest

from django_dlock.backends.database.connection import connect_failure, failure


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('FATAL:  password authentication failed for user "app"', "denied"),
        ('FATAL:  role "app" does not exist', "denied"),
        ('FATAL:  database "shop" does not exist', "denied"),
        # These are over as soon as others have disconnected.
        ('FATAL:  too many connections for role "app"', "unreachable"),
        ('FATAL:  too many connections for database "shop"', "unreachable"),
        ("FATAL:  sorry, too many clients already", "unreachable"),
        ("FATAL:  the database system is starting up", "unreachable"),
    ],
)
def test_only_a_lasting_refusal_of_postgresql_is_a_refusal(text: str, kind: str) -> None:
    failure = connect_failure(RuntimeError(f"connection to server failed: {text}"))
    assert failure.kind == kind


def test_a_text_of_several_lines_becomes_one_without_the_statement() -> None:
    refused = RuntimeError("connection refused\n\tIs the server running on that host?\n")
    assert str(connect_failure(refused)) == "connection refused Is the server running on that host?"
    missing = RuntimeError('relation "x" does not exist\nLINE 1: SELECT a FROM x\n          ^')
    assert str(failure(missing)) == 'relation "x" does not exist'
