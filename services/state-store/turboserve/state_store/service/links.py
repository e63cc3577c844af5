"""Links to sessions: creation, listing, revocation, and what gateways need to sign and check them."""

from __future__ import annotations

import nats
from pydantic import SecretStr

from turboserve import logs
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.links import (
    CreateLink,
    GetSigning,
    LinkChange,
    LinkList,
    LinkRecord,
    LinkRef,
    ListLinks,
    Signing,
    SigningKey,
)
from turboserve.contracts.requests import SessionRef
from turboserve.ids import random_token
from turboserve.state_store.core.links import LinkRules, repeated
from turboserve.state_store.ports.database import Database
from turboserve.state_store.service.transactions import visible
from turboserve.subjects import LINK

NAME_BYTES, KEY_ID_BYTES, SECRET_BYTES = 16, 8, 32

log = logs.get("links")


class Links:
    """The endpoints of links, without their transport. All may raise UnavailableError."""

    def __init__(self, database: Database, bus: Bus, clock: Clock, rules: LinkRules) -> None:
        self._database, self._bus, self._clock, self._rules = database, bus, clock, rules

    async def create(self, request: CreateLink) -> LinkRecord:
        """Create a link.

        Raises SessionNotFoundError, InvalidInputError, LinkLimitError and ConflictError.
        """
        async with self._database.transaction() as db:
            # The lock makes the limits hold for requests at the same moment.
            await db.links.lock(random_token(NAME_BYTES))
            session = await db.sessions.get(request.session)
            visible(session, SessionRef(session=request.session, tenant=request.tenant))
            found = await db.links.get(request.id)
            if found is not None:
                return repeated(found, request)
            now = self._clock.wall()
            await db.links.delete_expired(now)
            counts = await db.links.counts(request.session, request.tenant, now)
            record = self._rules.created(request, counts, now)
            await db.links.insert(record)
        log.info("link created", link=record.id, session=record.session, role=record.role.value)
        return record

    async def list(self, request: ListLinks) -> LinkList:
        """Return the session's links that have not expired. Raises SessionNotFoundError."""
        async with self._database.transaction() as db:
            session = await db.sessions.get(request.session)
            visible(session, SessionRef(session=request.session, tenant=request.tenant))
            return LinkList(links=tuple(await db.links.of_session(request.session, self._clock.wall())))

    async def revoke(self, request: LinkRef) -> LinkRecord:
        """Revoke the link. Its row stays until its expiry. Raises NotFoundError."""
        async with self._database.transaction() as db:
            edition = await db.links.lock(random_token(NAME_BYTES))
            found = await db.links.get(request.link)
            if found is None or (found.session, found.tenant) != (request.session, request.tenant):
                raise NotFoundError(f"this session has no link {request.link}", field="link")
            if found.revoked_at is not None:
                return found
            record = found.model_copy(update={"revoked_at": self._clock.wall()})
            await db.links.revoke(record.id, record.revoked_at or 0.0)
            await db.links.change(edition.version + 1)
        log.info("link revoked", link=record.id, session=record.session)
        await self._announce(record.id, edition.version + 1)
        return record

    async def signing(self, request: GetSigning) -> Signing:
        """Return the signing keys and the revoked links, unless the gateway has this version.

        Creates the first key, and a new one when that is due.
        """
        async with self._database.transaction(durable=False) as db:
            edition = await db.links.edition()
            keys = await db.links.keys() if edition is not None else []
            due = self._rules.is_new_key_due(keys, self._clock.wall())
        if edition is not None and edition.version == request.version and not due:
            return Signing(database=edition.database, version=edition.version)
        async with self._database.transaction() as db:
            # The lock excludes a change between the reads.
            edition = await db.links.lock(random_token(NAME_BYTES))
            keys, now = await db.links.keys(), self._clock.wall()
            version = edition.version
            if self._rules.is_new_key_due(keys, now):
                secret = SecretStr(random_token(SECRET_BYTES))
                key = SigningKey(id=random_token(KEY_ID_BYTES), secret=secret, created_at=now)
                await db.links.insert_key(key)
                unused = self._rules.unused_keys(keys, now)
                await db.links.delete_keys(one.id for one in unused)
                keys = [*(one for one in keys if one not in unused), key]
                version += 1
                await db.links.change(version)
                log.info("signing key created", key=key.id, keys=len(keys))
            revoked = await db.links.revoked(now)
        return Signing(database=edition.database, version=version, keys=tuple(keys), revoked=tuple(revoked))

    async def _announce(self, link: str, version: int) -> None:
        """Send the hint. A gateway that misses it reads the version within a second."""
        try:
            await self._bus.publish(LINK, link, LinkChange(link=link, version=version))
        except (nats.errors.Error, OSError) as error:
            log.debug("hint not sent", link=link, error=repr(error))
