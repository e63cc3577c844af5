"""Operations on API keys: requests to the state store. The text of a key stays in this process."""

from __future__ import annotations

from turboserve.bus import Bus
from turboserve.contracts.base import is_id
from turboserve.contracts.errors import ConflictError, NotFoundError
from turboserve.contracts.keys import (
    ChangeKey,
    CreatedKey,
    CreateKey,
    KeyLimits,
    KeyPage,
    KeyRecord,
    KeyRef,
    ListKeys,
)
from turboserve.gateway.auth.access import Keys
from turboserve.gateway.auth.hashing import key_text
from turboserve.gateway.keys.schemas import KeyChanges, NewKey
from turboserve.gateway.problems.errors import KeysNotStoredError
from turboserve.gateway.repeats import digest, key_reused
from turboserve.ids import random_token
from turboserve.subjects import CHANGE_KEY, CREATE_KEY, GET_KEY, LIST_KEYS, REVOKE_KEY

ID_BYTES = 8


class StoredKeys:
    """Keys in the database. All requests raise the state store's typed errors."""

    def __init__(self, bus: Bus, keys: Keys) -> None:
        self._bus, self._keys = bus, keys

    def check(self) -> None:
        """Raise KeysNotStoredError if the gateway takes its keys from elsewhere."""
        if not self._keys.in_database:
            raise KeysNotStoredError(
                "this gateway's API keys are not in the database: set TURBOSERVE_API_KEYS_STORE=1, or start "
                "the stack with `turboserve up --auth`",
                field="TURBOSERVE_API_KEYS_STORE",
                limit="1",
            )

    async def create(self, creator: str, request: NewKey, repeat: str | None) -> tuple[CreatedKey, str]:
        """Create a key. Returns its row and its text, which is valid only if this request created the key.

        A repeat by the same tenant (`creator`) with the same Idempotency-Key (`repeat`) creates no other key.
        Raises KeyReusedError if that was a different request.
        """
        key = random_token(ID_BYTES) if repeat is None else digest("key", creator, repeat)[: 2 * ID_BYTES]
        text = key_text(key)
        wanted = CreateKey(
            id=key,
            tenant=request.tenant,
            scopes=tuple(sorted(set(request.scopes))),
            hash=self._keys.hash_of(text),
            expires_at=None if request.expires_at is None else request.expires_at.timestamp(),
            label=request.label,
            limits=KeyLimits(**request.limits.model_dump()),
        )
        try:
            return await self._bus.call(CREATE_KEY, wanted), text
        except ConflictError:
            if repeat is None:
                raise
            raise key_reused() from None

    async def page(self, request: ListKeys) -> KeyPage:
        return await self._bus.call(LIST_KEYS, request)

    async def get(self, key: str) -> KeyRecord:
        return await self._bus.call(GET_KEY, self._ref(key))

    async def change(self, key: str, request: KeyChanges) -> KeyRecord:
        """Set the limits that the request has."""
        wanted = ChangeKey(
            key=self._ref(key).key,
            changes=tuple(sorted(request.limits.model_fields_set)),
            limits=KeyLimits(**request.limits.model_dump()),
        )
        return await self._bus.call(CHANGE_KEY, wanted)

    async def revoke(self, key: str) -> KeyRecord:
        return await self._bus.call(REVOKE_KEY, self._ref(key))

    def _ref(self, key: str) -> KeyRef:
        if not is_id(key):
            raise NotFoundError("there is no such API key", field="key")
        return KeyRef(key=key)
