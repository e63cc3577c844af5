"""API keys: creation, listing, revocation, and the hashes that gateways need."""

from __future__ import annotations

import nats

from turboserve import logs
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.keys import (
    ChangeKey,
    CreatedKey,
    CreateKey,
    GetValidKeys,
    KeyChange,
    KeyPage,
    KeyRecord,
    KeyRef,
    ListKeys,
    NoteKeyUses,
    ValidKeys,
)
from turboserve.contracts.requests import Done
from turboserve.ids import random_token
from turboserve.state_store.core import key_limits
from turboserve.state_store.core import keys as rules
from turboserve.state_store.ports.database import Database
from turboserve.subjects import KEY

SALT_BYTES = 16

log = logs.get("keys")


class Keys:
    """The endpoints of API keys, without their transport. All may raise UnavailableError."""

    def __init__(self, database: Database, bus: Bus, clock: Clock) -> None:
        self._database, self._bus, self._clock = database, bus, clock

    async def create(self, request: CreateKey) -> CreatedKey:
        """Create a key. Raises ConflictError, InvalidInputError and KeyLimitError."""
        async with self._database.transaction() as db:
            edition = await db.keys.lock(random_token(SALT_BYTES))
            found = await db.keys.get(request.id)
            if found is not None:
                return CreatedKey(key=rules.repeated(found, request), created=False)
            now = self._clock.wall()
            record = rules.created(request, await db.keys.count_valid(now), now)
            await db.keys.insert(record, request.hash)
            await db.keys.write_version(edition.version + 1)
        log.info("api key created", key=record.id, tenant=record.tenant, scopes=",".join(record.scopes))
        await self._announce(record.id, edition.version + 1)
        return CreatedKey(key=record, created=True)

    async def get(self, request: KeyRef) -> KeyRecord:
        """Return the key's row. Raises NotFoundError."""
        async with self._database.statement() as db:
            found = await db.keys.get(request.key)
        if found is None:
            raise NotFoundError(f"there is no API key {request.key}", field="key")
        return found

    async def list(self, request: ListKeys) -> KeyPage:
        async with self._database.statement() as db:
            return await db.keys.page(request)

    async def change(self, request: ChangeKey) -> KeyRecord:
        """Set limits of the key. Raises NotFoundError and InvalidInputError."""
        async with self._database.transaction() as db:
            edition = await db.keys.lock(random_token(SALT_BYTES))
            found = await db.keys.get(request.key)
            if found is None:
                raise NotFoundError(f"there is no API key {request.key}", field="key")
            record = key_limits.changed(found, request)
            if record == found:
                return found
            await db.keys.change(record.id, record.limits)
            await db.keys.write_version(edition.version + 1)
        log.info("limits of api key changed", key=record.id, tenant=record.tenant)
        await self._announce(record.id, edition.version + 1)
        return record

    async def revoke(self, request: KeyRef) -> KeyRecord:
        """Revoke the key. Its row stays, so that a repeat gets the same answer. Raises NotFoundError."""
        async with self._database.transaction() as db:
            edition = await db.keys.lock(random_token(SALT_BYTES))
            found = await db.keys.get(request.key)
            if found is None:
                raise NotFoundError(f"there is no API key {request.key}", field="key")
            if found.revoked_at is not None:
                return found
            record = found.model_copy(update={"revoked_at": self._clock.wall()})
            await db.keys.revoke(record.id, record.revoked_at or 0.0)
            await db.keys.write_version(edition.version + 1)
        log.info("api key revoked", key=record.id, tenant=record.tenant)
        await self._announce(record.id, edition.version + 1)
        return record

    async def valid(self, request: GetValidKeys) -> ValidKeys:
        """Return the keys that are neither revoked nor expired, unless the gateway has this version."""
        async with self._database.statement() as db:
            edition = await db.keys.edition()
            if edition is not None and edition.version == request.version:
                return ValidKeys(salt=edition.salt, version=edition.version)
        async with self._database.transaction() as db:
            # The lock excludes a change between the two reads.
            edition = await db.keys.lock(random_token(SALT_BYTES))
            keys = await db.keys.valid(self._clock.wall())
        return ValidKeys(salt=edition.salt, version=edition.version, keys=tuple(keys))

    async def note_uses(self, request: NoteKeyUses) -> Done:
        """Write when keys were last used. A crash of Postgres may undo it."""
        uses = rules.plausible_uses(request.uses, self._clock.wall())
        if uses:
            async with self._database.transaction(durable=False) as db:
                await db.keys.note_uses(uses, rules.USE_INTERVAL_S)
        return Done()

    async def _announce(self, key: str, version: int) -> None:
        """Send the hint. A gateway that misses it reads the version within a second."""
        try:
            await self._bus.publish(KEY, key, KeyChange(key=key, version=version))
        except (nats.errors.Error, OSError) as error:
            log.debug("hint not sent", key=key, error=repr(error))
