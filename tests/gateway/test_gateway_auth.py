"""Keys, tenants and settings."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from tests.helpers.virtual_clock import VirtualClock
from turboserve.contracts.keys import Scope
from turboserve.gateway.auth import key_list
from turboserve.gateway.auth.access import Identity, Keys, bearer
from turboserve.gateway.auth.hashing import OPERATOR_SCOPES, KeySet, StoredKey
from turboserve.gateway.problems.errors import KeysUnreadError, MissingScopeError
from turboserve.gateway.settings import Settings

K1, K2 = "secret-1-0123456789", "secret-2-0123456789"


def test_without_keys_everyone_is_the_default_tenant() -> None:
    everyone = Identity("default", OPERATOR_SCOPES | {Scope.WEBHOOKS_WRITE})
    assert Keys(None).identify(None) == everyone
    assert Keys(None).identify("whatever") == everyone
    assert not Keys(None)


@pytest.mark.parametrize("key", [None, "", "wrong", K1[:-1], f"{K1}x", "schlüssel\udcff"])
def test_with_keys_only_a_known_one_opens(key: str | None) -> None:
    keys = Keys(key_list.parse(f"{K1}=alice,{K2}=bob"), operators=["alice"])
    assert keys.identify(key) is None
    found = keys.identify(K2)
    assert found is not None
    assert (found.tenant, found.operator) == ("bob", False)
    assert keys.operators == ("alice",)


def of_scopes(*scopes: str, **more: object) -> tuple[Keys, VirtualClock]:
    """Return keys of which `K1` has these scopes."""
    clock, empty = VirtualClock(), KeySet()
    stored = {"id": "k1", "tenant": "acme", "scopes": scopes, "hash": empty.hash_of(K1), **more}
    key_set = KeySet(salt=empty.salt, keys=(StoredKey.model_validate(stored),))
    return Keys(key_set, clock=clock, stored=True), clock


def test_admin_includes_every_scope_and_no_other_scope_includes_another() -> None:
    for given in Scope:
        found = of_scopes(given)[0].identify(K1)
        assert found is not None
        assert {scope for scope in Scope if found.may(scope)} == (
            set(Scope) if given is Scope.ADMIN else {given}
        )


def test_a_key_without_scopes_has_those_of_its_role() -> None:
    keys = Keys(key_list.parse(f"{K1}=alice,{K2}=bob"), operators=["alice"])
    alice, bob = keys.identify(K1), keys.identify(K2)
    assert alice is not None
    assert bob is not None
    # A key sends events to addresses outside only if it names the scope.
    named = {Scope.ADMIN, Scope.WEBHOOKS_WRITE}
    assert {scope for scope in Scope if alice.may(scope)} == set(Scope) - named
    assert {scope for scope in Scope if bob.may(scope)} == {Scope.SESSIONS_READ, Scope.SESSIONS_WRITE}


def test_an_operators_key_with_named_scopes_has_these_only() -> None:
    empty = KeySet()
    stored = [
        StoredKey(id="reads", tenant="ops", scopes=(Scope.SESSIONS_READ,), hash=empty.hash_of(K1)),
        StoredKey(id="all", tenant="ops", hash=empty.hash_of(K2)),
    ]
    keys = Keys(KeySet(salt=empty.salt, keys=tuple(stored)), operators=["ops"])
    reads, operator = keys.identify(K1), keys.identify(K2)
    assert reads is not None
    assert operator is not None
    assert {scope for scope in Scope if reads.may(scope)} == {Scope.SESSIONS_READ}
    assert operator.operator
    with pytest.raises(MissingScopeError) as caught:
        reads.require(Scope.POOL_WRITE)
    assert (caught.value.field, caught.value.limit) == ("scope", Scope.POOL_WRITE.value)
    operator.require(Scope.POOL_WRITE)


def test_a_key_expires_by_the_gateways_clock() -> None:
    keys, clock = of_scopes("sessions:read", expires_at=VirtualClock().wall() + 10.0)
    clock.advance(9.9)
    found = keys.identify(K1)
    assert found is not None
    assert keys.holds(found)
    assert keys.uses == {"k1": clock.wall()}
    clock.advance(0.1)
    assert keys.identify(K1) is None
    assert not keys.holds(found)


def test_keys_that_were_not_read_yet_are_unavailable_and_not_unknown() -> None:
    keys = Keys(None, stored=True)
    assert (bool(keys), keys.known) == (True, False)
    with pytest.raises(KeysUnreadError) as caught:
        keys.identify(K1)
    assert caught.value.retryable
    assert keys.identify(None) is None
    assert not keys.holds(Identity("acme", OPERATOR_SCOPES, "k1"))
    keys.replace(KeySet())
    assert (bool(keys), keys.known) == (True, True)
    assert keys.identify(K1) is None


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", None), ("Bearer", None), (None, None)],
)
def test_bearer(header: str | None, token: str | None) -> None:
    assert bearer(header) == token


@pytest.mark.parametrize(
    "text", [f"{K1}=alice,{K2}=bob", f" {K1}=alice , {K2}=bob,", f'{{"{K1}": "alice", "{K2}": "bob"}}']
)
def test_keys_are_read_from_a_list_or_json(text: str) -> None:
    for given in (text, SecretStr(text)):
        keys = Keys(Settings.model_validate({"api_keys": given}).key_set())
        found = [keys.identify(key) for key in (K1, K2)]
        assert [one and one.tenant for one in found] == ["alice", "bob"]


@pytest.mark.parametrize(
    "text", ["hunter2", '{"hunter2": 5}', '{"hunter2"', "hunter2-hunter2-hunter2=not an id", "hunter2=short"]
)
def test_unreadable_keys_are_refused_without_being_shown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSERVE_API_KEYS", text)
    with pytest.raises(ValidationError, match="api_keys") as caught:
        Settings()
    assert "hunter2" not in str(caught.value)


def test_origins_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSERVE_CORS_ORIGINS", "https://a.example/, https://b.example")
    assert Settings().cors_origins == ("https://a.example", "https://b.example")
