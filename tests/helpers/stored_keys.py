"""API keys of known texts in the database, for gateways with `TURBOSERVE_API_KEYS_STORE`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.helpers.service_process import LIMIT_S, connected
from tests.helpers.waiting import eventually
from turboserve import subjects
from turboserve.cli.embedded import NatsServer
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.keys import CreateKey, GetValidKeys
from turboserve.gateway.auth.hashing import KeySet


@dataclass(frozen=True)
class StoredKeyText:
    """A key to store."""

    id: str
    tenant: str
    text: str
    scopes: Sequence[str]
    expires_at: float | None = None


async def store_keys(nats: NatsServer, keys: Iterable[StoredKeyText]) -> None:
    """Create the keys, as a gateway does. Waits until the state store answers."""
    bus = await connected(nats, "gateway", LIMIT_S)
    salts: list[str] = []

    async def read() -> bool:
        try:
            salts.append((await bus.call(subjects.GET_VALID_KEYS, GetValidKeys())).salt)
        except UnavailableError:
            return False
        return True

    try:
        await eventually(read)
        for key in keys:
            request = CreateKey(
                id=key.id,
                tenant=key.tenant,
                scopes=tuple(key.scopes),
                hash=KeySet(salt=salts[-1]).hash_of(key.text),
                expires_at=key.expires_at,
            )
            await bus.call(subjects.CREATE_KEY, request)
    finally:
        await bus.close()
