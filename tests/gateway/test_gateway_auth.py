"""Keys, tenants and settings."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from turboserve.gateway.auth import key_list
from turboserve.gateway.auth.access import Identity, Keys, bearer
from turboserve.gateway.settings import Settings

K1, K2 = "secret-1-0123456789", "secret-2-0123456789"


def test_without_keys_everyone_is_the_default_tenant() -> None:
    everyone = Identity("default", operator=True)
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
