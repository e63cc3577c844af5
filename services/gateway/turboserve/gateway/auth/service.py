"""API keys. A key names a tenant; a session belongs to the tenant that created it."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from turboserve.contracts.errors import UnauthorizedError

DEFAULT_TENANT = "default"


class Keys:
    """Which key is whose. Without any key, everyone is the tenant `default`."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._tenants = {key.encode(): tenant for key, tenant in tenants.items()}

    def __bool__(self) -> bool:
        """Whether there is any key, so that one is needed."""
        return bool(self._tenants)

    def tenant_of(self, key: str | None) -> str:
        """The tenant of `key`; raises UnauthorizedError. Takes the same time whichever key matches."""
        if not self._tenants:
            return DEFAULT_TENANT
        if not key:
            raise UnauthorizedError(
                "an API key is needed: Authorization: Bearer KEY, or ?access_token=KEY", field="Authorization"
            )
        given = key.encode(errors="replace")
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, given):
                found = tenant
        if found is None:
            raise UnauthorizedError("this API key is not known", field="Authorization")
        return found


def bearer(header: str | None) -> str | None:
    """The token of an Authorization header."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None
