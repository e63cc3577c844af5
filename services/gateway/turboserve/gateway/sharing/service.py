"""Operations on links and tickets. The text of a link or ticket stays in this process."""

from __future__ import annotations

from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.base import is_id
from turboserve.contracts.errors import ConflictError, NotFoundError
from turboserve.contracts.keys import Scope
from turboserve.contracts.links import CreateLink, LinkList, LinkRecord, LinkRef, ListLinks, Role
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.auth.grants import Grant, GrantKind
from turboserve.gateway.auth.signing import GrantSigner
from turboserve.gateway.problems.errors import LinkRoleError
from turboserve.gateway.repeats import id_of, key_reused
from turboserve.gateway.sessions.service import Sessions
from turboserve.gateway.sharing.schemas import NewLink
from turboserve.subjects import CREATE_LINK, LIST_LINKS, REVOKE_LINK


class Sharing:
    """Links to sessions and tickets for their streams. All raise the state store's typed errors."""

    def __init__(
        self, bus: Bus, clock: Clock, sessions: Sessions, signer: GrantSigner, ticket_lifetime_s: float
    ) -> None:
        self._bus, self._clock, self._sessions, self._signer = bus, clock, sessions, signer
        self._ticket_lifetime_s = ticket_lifetime_s

    async def ticket(self, caller: Identity, session: str, role: Role | None) -> tuple[str, Grant]:
        """Return the text of a ticket, and what it grants.

        `role` None: what the caller may do. Works without the state store for a session that this gateway has
        served, so that viewers can reconnect. Raises SessionNotFoundError, MissingScopeError, LinkRoleError
        and KeysUnreadError.
        """
        self._sessions.check_id(session)
        if role is None:
            role = Role.CONTROLLER if caller.may(Scope.SESSIONS_WRITE) else Role.VIEWER
        elif caller.grant is not None and not caller.grant.role.includes(role):
            raise LinkRoleError(
                f"the link's role is {caller.grant.role.value}, and not {role.value}",
                field="role",
                limit=role.value,
            )
        elif role is Role.CONTROLLER:
            caller.require(Scope.SESSIONS_WRITE)
        record = await self._sessions.get_or_remembered(caller.tenant, session)
        link = caller.grant
        grant = Grant(
            session=record.id,
            tenant=record.tenant,
            role=role,
            expires_at=round(self._clock.wall() + self._ticket_lifetime_s, 3),
            link=None if link is None else link.link,
            link_expires_at=None if link is None else link.expires_at,
            key=caller.key_id,
        )
        return await self._signer.sign(GrantKind.TICKET, grant), grant

    async def create(
        self, caller: Identity, session: str, request: NewLink, repeat: str | None
    ) -> tuple[LinkRecord, str]:
        """Create a link. Returns its row and its text.

        A repeat of the tenant with the same Idempotency-Key (`repeat`) creates no other link. Raises
        KeyReusedError if that was a different request.
        """
        self._sessions.check_id(session)
        link = id_of("lnk", caller.tenant, session, repeat=repeat, purpose="link")
        wanted = CreateLink(
            id=link,
            session=session,
            tenant=caller.tenant,
            role=request.role,
            label=request.label,
            created_by=caller.key_id,
            expires_at=None if request.expires_at is None else request.expires_at.timestamp(),
        )
        try:
            record = await self._bus.call(CREATE_LINK, wanted)
        except ConflictError:
            if repeat is None:
                raise
            raise key_reused() from None
        grant = Grant(record.session, record.tenant, record.role, record.expires_at, record.id)
        return record, await self._signer.sign(GrantKind.LINK, grant)

    async def list(self, tenant: str, session: str) -> LinkList:
        self._sessions.check_id(session)
        return await self._bus.call(LIST_LINKS, ListLinks(session=session, tenant=tenant))

    async def revoke(self, tenant: str, session: str, link: str) -> LinkRecord:
        self._sessions.check_id(session)
        # The session first: of another tenant's session, a caller learns nothing.
        await self._sessions.get(tenant, session)
        if not is_id(link):
            raise NotFoundError("this session has no such link", field="link")
        return await self._bus.call(REVOKE_LINK, LinkRef(link=link, session=session, tenant=tenant))
