"""Follows the signing keys and the revoked links of the database, and signs and checks links and tickets.

Nothing is read before the first link or ticket. From then on a revocation takes effect within two seconds:
the state store sends a hint, and the gateway asks for the version every `LOOK_EVERY_S`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from turboserve import logs
from turboserve.bus import UNREADABLE, Bus
from turboserve.clock import Clock
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.links import GetSigning, LinkChange, Signing, SigningKey
from turboserve.gateway.auth.grants import Grant, GrantKind, signed, verified
from turboserve.gateway.auth.stored import ANSWER_S, LOOK_EVERY_S, RETRY_S
from turboserve.gateway.problems.errors import KeysUnreadError, LinkEndedError, TicketExpiredError
from turboserve.subjects import GET_SIGNING, LINK

log = logs.get("auth")


class GrantSigner:
    """The signing keys and the revoked links. While the state store is away, the known ones stay."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._database: str | None = None
        self._version: int | None = None
        self._keys: dict[str, SigningKey] = {}
        self._newest: SigningKey | None = None
        self._revoked: frozenset[str] = frozenset()
        self._tried_at: float | None = None
        """When the last read ended, by the monotonic clock. None: a read is due."""
        self._reading = asyncio.Lock()
        self._wanted, self._changed = asyncio.Event(), asyncio.Event()
        self._failed = False

    async def listen(self) -> None:
        """Receive the hints about revocations."""
        await self._bus.subscribe(LINK, "*", self._hint)

    async def run(self) -> None:
        """From the first link or ticket on, read at each hint and every `LOOK_EVERY_S`; never returns."""
        await self._wanted.wait()
        while True:
            self._changed.clear()
            async with self._reading:
                read = await self._read()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_EVERY_S if read else RETRY_S)

    async def sign(self, kind: GrantKind, grant: Grant) -> str:
        """Return the text of a grant. Raises KeysUnreadError."""
        await self._ready()
        if self._newest is None:
            raise _unread()
        return signed(kind, grant, self._newest)

    async def check(self, kind: GrantKind, text: str) -> Grant | None:
        """Return what the text grants; None if no gateway of this deployment has signed it.

        Raises:
            LinkEndedError: The link was revoked or has expired.
            TicketExpiredError: The ticket has expired.
            KeysUnreadError: The state store has not answered since the start.
        """
        await self._ready()
        if not self._keys:
            raise _unread()
        grant = verified(kind, text, self._keys)
        if grant is None:
            return None
        if kind is GrantKind.TICKET and grant.expires_at <= self._clock.wall():
            raise TicketExpiredError("this ticket has expired: ask for a new one", field="ticket")
        if not self.holds(grant):
            raise LinkEndedError("this link was revoked or has expired", field="Authorization")
        return grant

    def holds(self, grant: Grant) -> bool:
        """Return whether the grant's signing key is known, and its link neither revoked nor expired."""
        if grant.signing_key not in self._keys:
            return False
        if grant.link is None:
            return True
        until = grant.expires_at if grant.link_expires_at is None else grant.link_expires_at
        return grant.link not in self._revoked and until > self._clock.wall()

    async def _ready(self) -> None:
        """Have what the state store had at most `LOOK_EVERY_S` ago, if it answers."""
        self._wanted.set()
        if self._is_fresh:
            return
        async with self._reading:
            # Another request may have read meanwhile.
            if not self._is_fresh:
                await self._read()

    @property
    def _is_fresh(self) -> bool:
        tried_at = self._tried_at
        return tried_at is not None and self._clock.monotonic() - tried_at <= LOOK_EVERY_S

    async def _hint(self, _change: LinkChange, _body: bytes) -> None:
        self._tried_at = None
        self._changed.set()

    async def _read(self) -> bool:
        """Read what has changed. Returns whether the state store answered. The caller holds `_reading`."""
        try:
            answer = await self._ask(self._version)
            if answer.keys is None and answer.database != self._database:
                # Another database has the same version by chance.
                answer = await self._ask(None)
        except (TurboServeError, *UNREADABLE) as error:
            if not self._failed:
                log.warning("revoked links not read: the known ones stay", error=str(error)[:200])
            self._failed = True
            return False
        finally:
            self._tried_at = self._clock.monotonic()
        self._failed = False
        if answer.keys:
            self._database, self._version = answer.database, answer.version
            self._keys = {key.id: key for key in answer.keys}
            self._newest = answer.keys[-1]
            self._revoked = frozenset(answer.revoked)
        return True

    async def _ask(self, version: int | None) -> Signing:
        return await self._bus.call(GET_SIGNING, GetSigning(version=version), deadline_s=ANSWER_S)


def _unread() -> KeysUnreadError:
    return KeysUnreadError(
        "the signing keys of links and tickets are not read yet", field="Authorization", retry_after_s=1.0
    )
