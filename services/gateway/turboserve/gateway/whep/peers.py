"""The WebRTC viewers of this gateway, by id. A viewer's connection outlives the request that opened it.

The id names the gateway: behind a load balancer, the request that ends a connection may reach any gateway.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import nats.errors

from turboserve.bus import Bus
from turboserve.contracts.errors import UnavailableError
from turboserve.contracts.viewers import LeaveViewer
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.context import Gateway, owner_of
from turboserve.gateway.events.session_events import known_position
from turboserve.gateway.ice_servers import IceServer, ice_servers
from turboserve.gateway.problems.errors import PeerNotFoundError
from turboserve.gateway.stream.watch import place_of_viewer
from turboserve.gateway.whep.frame_times import FrameTimes
from turboserve.gateway.whep.offer import check_offer
from turboserve.ids import new_id
from turboserve.subjects import LEAVE
from turboserve.tasks import BackgroundTasks

if TYPE_CHECKING:
    from turboserve.gateway.whep.peer import Peer

CHECK_S = 1.0
"""Interval at which viewers' playheads are reported, and their keys and unread messages checked, seconds."""
_NAME = re.compile(r"peer_(?P<gateway>[0-9a-z]{26})_[0-9a-z]{26}")
"""Id of a viewer. Earlier versions do not name the gateway."""


def servers_for(gateway: Gateway, viewer: str) -> tuple[IceServer, ...]:
    """Return the STUN and TURN servers, with the credentials for `viewer`."""
    settings = gateway.settings
    secret = None if settings.turn_secret is None else settings.turn_secret.get_secret_value()
    return ice_servers(settings.ice_servers, secret, viewer, gateway.clock.wall())


class Peers:
    """Viewers from their offer until they leave."""

    def __init__(self, gateway: str) -> None:
        """`gateway` is the id of this gateway."""
        self._peers: dict[str, Peer] = {}
        self._tasks = BackgroundTasks()
        self._loading: asyncio.Task[ModuleType] | None = None
        self._times = FrameTimes()
        self._checking = False
        self._check_task: asyncio.Task[None] | None = None
        self._id = gateway

    async def listen(self, bus: Bus) -> None:
        """Receive the requests to leave that other gateways took for this gateway's viewers."""
        await bus.subscribe(LEAVE, self._id, self._leave_requested)

    async def open(
        self,
        gateway: Gateway,
        identity: Identity,
        session: str,
        offer: str,
        path: str,
        events_after: int | None = None,
    ) -> tuple[str, str]:
        """Answer the offer of a viewer, and serve it from now on. Returns its id and the answer.

        Sends events with a number above `events_after`; None: only new events.

        Raises the errors of `Streams.check`, `place_of_viewer`, `check_offer` and `Peer.answer`.
        """
        with ExitStack() as stack:
            stack.enter_context(gateway.streams.place(*owner_of(identity)))
            record, start = await place_of_viewer(gateway, identity.tenant, session, None)
            if events_after is not None:
                events_after = await known_position(gateway.bus, record, events_after)
            checked = check_offer(offer, candidates=bool(gateway.settings.ice_servers))
            module = await self._module()
            name = self._new_name()
            servers = servers_for(gateway, name)
            peer: Peer = module.Peer(
                gateway, identity, record, start, path, servers, events_after, self._times
            )
            try:
                answer = await peer.answer(checked)
            except BaseException:
                await peer.close()
                raise
            self._peers[name] = peer
            if not self._checking:
                self._checking = True
                self._check(gateway)
            self._tasks.create(self._serve(name, peer, stack.pop_all()), name)
        return name, answer

    async def leave(self, gateway: Gateway, tenant: str, session: str, name: str) -> None:
        """End the connection of a viewer. Another gateway's viewer leaves when that gateway gets the message.

        Raises PeerNotFoundError, UnavailableError and the errors of `Sessions.get`.
        """
        gateway.sessions.check_id(session)
        await gateway.sessions.get_or_remembered(tenant, session)
        found = _NAME.fullmatch(name)
        if found is not None and (other := f"gtw_{found['gateway']}") != self._id:
            request = LeaveViewer(tenant=tenant, session=session, peer=name)
            try:
                await gateway.bus.publish(LEAVE, other, request)
            except (nats.errors.Error, OSError) as error:
                raise UnavailableError(
                    f"the request cannot be passed on to the gateway that serves {name}: try again"
                ) from error
        elif not self._leave(tenant, session, name):
            raise PeerNotFoundError(f"session {session} has no viewer {name[:64]} over WebRTC", field="peer")

    async def _leave_requested(self, request: LeaveViewer, _body: bytes) -> None:
        self._leave(request.tenant, request.session, request.peer)

    def _leave(self, tenant: str, session: str, name: str) -> bool:
        """Have this gateway's viewer leave. Returns whether there is such a viewer of this session."""
        peer = self._peers.get(name)
        if peer is None or (peer.tenant, peer.session) != (tenant, session):
            return False
        peer.leaving.set()
        return True

    def _new_name(self) -> str:
        return f"peer_{self._id.removeprefix('gtw_')}_{new_id('peer').removeprefix('peer_')}"

    async def _serve(self, name: str, peer: Peer, place: ExitStack) -> None:
        with place:
            try:
                await peer.serve()
            finally:
                del self._peers[name]

    def _check(self, gateway: Gateway) -> None:
        """Have all viewers checked from time to time, while there are some."""
        self._checking = bool(self._peers)
        if self._checking:
            # Frames are sent at this time, too: the process is awake. One task for all costs less.
            next_s = (gateway.clock.monotonic() // CHECK_S + 1) * CHECK_S
            self._times.call_at(next_s, partial(self._check, gateway))
        if self._check_task is None or self._check_task.done():
            self._check_task = self._tasks.create(_check_all(list(self._peers.values())))

    async def _module(self) -> ModuleType:
        """Load what WebRTC needs, which takes tens of MB: only a gateway with such viewers pays for it."""
        if self._loading is None or (self._loading.done() and self._loading.exception() is not None):
            self._loading = asyncio.create_task(
                asyncio.to_thread(importlib.import_module, "turboserve.gateway.whep.peer")
            )
        return await asyncio.shield(self._loading)


async def _check_all(peers: Sequence[Peer]) -> None:
    for peer in peers:
        await peer.check()
