"""Stored fingerprints: nobody can guess from them, and they are compared under every key."""

from __future__ import annotations

import pytest

from django_dlock.keys.digests import fingerprint
from django_dlock.models import IdempotencyRecord
from django_dlock.records import payloads

SCOPE, KEY = "shop.unlock", "door:7"


@pytest.fixture(autouse=True)
def secret(settings):
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "first", []


def of(pin: int) -> str:
    return fingerprint({"pin": f"{pin:04}"}, what="the arguments of the test")


def stored(pin: int = 4711) -> str:
    return payloads.keyed(SCOPE, KEY, of(pin))


def is_known(text: str, pin: int = 4711) -> bool:
    return payloads.is_same(text, SCOPE, KEY, of(pin))


def test_a_code_of_four_digits_cannot_be_guessed_without_the_key(settings):
    text = stored()
    settings.SECRET_KEY = "that of whoever guesses"
    assert not any(is_known(text, pin) or text == of(pin) for pin in range(10_000))


def test_equal_payloads_of_two_records_do_not_look_equal():
    """Otherwise it could be guessed with a record of one's own."""
    made = {
        payloads.keyed(scope, key, of(4711))
        for scope, key in (("a", "b"), ("a", "c"), ("b", "b"), ("ab", ""), ("", "ab"))
    }
    assert len(made) == 5


@pytest.mark.parametrize("place", [0, 1, 2])
def test_g14_a_payload_is_compared_under_every_key_of_the_settings(settings, place):
    text = stored()
    keys = ["second", "third"]
    keys.insert(place, "first")
    settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS = keys
    assert is_known(text)
    assert not is_known(text, 4712)
    assert place == 0 or stored() != text


def test_g14_a_payload_under_a_key_that_is_gone_counts_as_another_one(settings):
    text = stored()
    settings.SECRET_KEY = "second"
    assert not is_known(text)


def test_g14_a_payload_that_an_earlier_version_has_stored_is_compared():
    assert is_known(of(4711))
    assert not is_known(of(4711), 4712)
    assert payloads.is_same("0" * 64, SCOPE, KEY, "0" * 64)


def test_nothing_stays_nothing():
    """``idempotency_payload=[]`` compares nothing."""
    assert payloads.keyed(SCOPE, KEY, "") == ""
    assert payloads.is_same("", SCOPE, KEY, "")
    assert not payloads.is_same("", SCOPE, KEY, of(4711))
    assert not payloads.is_same(stored(), SCOPE, KEY, "")


def test_it_fits_into_the_column_and_never_changes_between_releases():
    text = payloads.keyed("a", "\ud800", "v1:c")
    assert text == "k1:HvkvOA84jKz48WCcsyox9vg6QPkNtTdK2JG-COwIn8Q"
    assert len(text) <= (IdempotencyRecord._meta.get_field("payload").max_length or 0)
