"""API keys in the database, through a gateway's `/v1/keys`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from turboserve.cli.gateway_request import ask, listed


class GatewayKeys:
    """Requests of a key with the scope `admin`. Raises the client's errors."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._key = url, key

    def add(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Create a key. The answer's `key` is None if it was lost on its way, and a repeat found the key."""
        made: dict[str, Any] = self._ask("POST", "/v1/keys", json=request, idempotent=False)
        return made

    def list(self) -> Iterator[dict[str, Any]]:
        """Return all keys, newest first."""
        found, _ = listed(self._url, self._key, "/v1/keys", "keys", {})
        return iter(found)

    def change(self, key_id: str, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Set limits of a key; None removes one."""
        changed: dict[str, Any] = self._ask("PATCH", f"/v1/keys/{key_id}", json={"limits": limits})
        return changed

    def revoke(self, key_id: str) -> dict[str, Any]:
        revoked: dict[str, Any] = self._ask("DELETE", f"/v1/keys/{key_id}")
        return revoked

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        return ask(self._url, self._key, method, path, **options)
