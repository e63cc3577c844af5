"""Ids that are derived from an Idempotency-Key. They outlast an upgrade, after which a repeat may come."""

from __future__ import annotations

from turboserve.gateway.repeats import digest, id_of


def test_ids_of_repeats_are_those_of_earlier_versions() -> None:
    assert id_of("ses", "acme", repeat="order-17") == "ses_67a2d899e8f4b226c234560e12faaa2d"
    assert (
        id_of("lnk", "acme", "ses_1", repeat="order-17", purpose="link")
        == "lnk_89a968172b7c5ce9e721d554bf3eff95"
    )
    assert (
        id_of("wh", "acme", "id", repeat="order-17", purpose="webhook")
        == "wh_19e5298346c7111ae9d7c6da6f766831"
    )
    assert digest("key", "acme", "order-17")[:16] == "14d2a0b81dfbfd37"


def test_without_a_key_every_request_has_its_own_id() -> None:
    first, second = (id_of("ses", "acme", repeat=None) for _ in range(2))
    assert first.startswith("ses_")
    assert first != second


def test_no_two_scopes_share_an_id() -> None:
    assert id_of("ses", "a", repeat="b") != id_of("ses", "ab", repeat="")
    assert id_of("ses", "a", repeat="b") != id_of("rec", "a", repeat="b")
