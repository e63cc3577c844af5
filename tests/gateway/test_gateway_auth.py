"""Keys, tenants and settings."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from turboserve.contracts.errors import UnauthorizedError
from turboserve.gateway.auth.service import Keys, bearer
from turboserve.gateway.settings import Settings, tenants_by_key


def test_without_keys_everyone_is_the_default_tenant() -> None:
    assert Keys({}).tenant_of(None) == "default"
    assert Keys({}).tenant_of("whatever") == "default"


@pytest.mark.parametrize("key", [None, "", "wrong", "secre", "secret1x", "schlüssel\udcff"])
def test_with_keys_only_a_known_one_opens(key: str | None) -> None:
    keys = Keys({"secret1": "alice", "secret2": "bob"})
    with pytest.raises(UnauthorizedError):
        keys.tenant_of(key)
    assert keys.tenant_of("secret2") == "bob"


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", None), ("Bearer", None), (None, None)],
)
def test_bearer(header: str | None, token: str | None) -> None:
    assert bearer(header) == token


@pytest.mark.parametrize("text", ["k1=alice,k2=bob", " k1=alice , k2=bob,", '{"k1": "alice", "k2": "bob"}'])
def test_keys_are_read_from_a_list_or_json(text: str) -> None:
    assert tenants_by_key(SecretStr(text)) == {"k1": "alice", "k2": "bob"}


@pytest.mark.parametrize("text", ["hunter2", '{"hunter2": 5}', '{"hunter2"', "hunter2=not an id"])
def test_unreadable_keys_are_refused_without_being_shown(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSERVE_API_KEYS", text)
    with pytest.raises(ValidationError, match="api_keys") as caught:
        Settings()
    assert "hunter2" not in str(caught.value)


def test_origins_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSERVE_CORS_ORIGINS", "https://a.example/, https://b.example")
    assert Settings().cors_origins == ("https://a.example", "https://b.example")
