"""Simulated users: create, prompt, pause, resume, migrate, end, leave and return, at seeded moments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.sessions import Activity, SessionRecord
from turboserve.gateway.auth.access import DEFAULT_TENANT as TENANT
from turboserve.gateway.context import Gateway
from turboserve.gateway.sessions.schemas import NewSession, QualityInput
from turboserve.simulation.log_checks import SimulatedViewer
from turboserve.simulation.service import ConnectionLostError, ServiceProcess
from turboserve.simulation.viewer import ENDED, GONE, ViewerConnection
from turboserve.simulation.world import World

RECONNECT_S = 0.5
ANSWER_S = 8.0
"""Time after which a client gives up a request."""
STRANGE = 0.15
"""Probability that a user of another tenant interferes with a user's action, if there are several tenants."""
NOT_FOUND = (4404, 404)

Call = Callable[[Gateway], Awaitable[Any]]


class Clients:
    """Requests to any gateway, and viewers that stay connected."""

    def __init__(self, world: World) -> None:
        self.viewers: list[SimulatedViewer] = []
        self.seeds: dict[str, int] = {}
        """Session → the seed of its video, for each session whose creation was answered."""
        self._world = world
        self._connections: dict[str, ViewerConnection] = {}
        self._numbers = self._viewed = 0
        self._spawn(self._reconnect())

    @property
    def viewed(self) -> int:
        """Number of chunks that viewers received."""
        return self._viewed + sum(viewer.seen for viewer in self.viewers)

    def forget(self, viewer: SimulatedViewer) -> None:
        """Remove a viewer that never returns."""
        self._viewed += viewer.seen
        self.viewers.remove(viewer)

    def connected(self, viewer: SimulatedViewer) -> bool:
        return viewer.name in self._connections

    def watch(
        self, session: str, tenant: str = TENANT, *, socket: bool = True, from_start: bool = False
    ) -> SimulatedViewer:
        """Add a viewer of the session, from its playhead on or `from_start`."""
        name = f"view_{self.number()}"
        viewer = SimulatedViewer(name, session, tenant, socket, 0 if from_start else None)
        self.viewers.append(viewer)
        self._join(viewer)
        return viewer

    def leave(self, viewer: SimulatedViewer) -> None:
        viewer.watching = False
        connection = self._connections.get(viewer.name)
        if connection is not None:
            connection.leave()

    async def create(
        self,
        seed: int,
        prompt: str = "a red circle",
        attempts: int = 3,
        *,
        pin: bool = False,
        tenant: str = TENANT,
        model: str | None = None,
    ) -> SessionRecord | None:
        """Create a session. Returns None if it was refused or no answer came."""
        quality = QualityInput(floor=None, pin=True) if pin else None
        request = NewSession(
            prompt=prompt, seed=seed, model=model, width=None, height=None, metadata={}, quality=quality
        )
        key = f"key-{self._world.seed}-{seed}-{self.number()}"
        record: SessionRecord | None = await self.ask(
            lambda gateway: gateway.sessions.create(tenant, request, key), attempts
        )
        return record

    async def ask(self, call: Call, attempts: int = 3) -> Any:
        """Repeat a request until its outcome is known. Returns None if it was refused or given up."""
        for _ in range(attempts):
            found = self._some_gateway()
            if found is None:
                await asyncio.sleep(RECONNECT_S)
                continue
            service, gateway = found
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await service.submit(_called(call, gateway))
            except (TimeoutError, ConnectionLostError):
                await asyncio.sleep(0.2)
            except TurboServeError as error:
                if not error.retryable:
                    return None
                await asyncio.sleep(1.0)
        return None

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _spawn(self, work: Any) -> None:
        self._world.loop.spawn(self._world.loop.world, work)

    def _some_gateway(self) -> tuple[ServiceProcess, Gateway] | None:
        """Choose a gateway as a load balancer does; None if there is none."""
        serving = self._world.gateways()
        return self._world.random.choice(serving) if serving else None

    async def _reconnect(self) -> None:
        while True:
            await asyncio.sleep(RECONNECT_S)
            for viewer in self.viewers:
                if viewer.watching and not viewer.over and not self.connected(viewer):
                    self._join(viewer)

    def _join(self, viewer: SimulatedViewer) -> None:
        found = self._some_gateway()
        if found is None:
            return
        service, gateway = found
        connection = ViewerConnection(self._world, viewer, service, self._left)
        self._connections[viewer.name] = connection
        connection.open(gateway)

    def _left(self, connection: ViewerConnection) -> None:
        viewer = connection.viewer
        if self._connections.get(viewer.name) is connection:
            del self._connections[viewer.name]
        if connection.code == ENDED and viewer.socket:
            viewer.over = True
        elif connection.code in GONE:
            viewer.next = None
        elif connection.code in NOT_FOUND:
            viewer.over = True
        elif connection.code == ENDED:
            # Plain HTTP does not report why a video ends, so the player asks for the session's phase.
            self._spawn(self._look(viewer))

    async def _look(self, viewer: SimulatedViewer) -> None:
        record = await self.ask(lambda gateway: gateway.sessions.get(viewer.tenant, viewer.session), 1)
        viewer.over = record is not None and record.phase.ended


async def _called(call: Call, gateway: Gateway) -> Any:
    return await call(gateway)


class Users(Clients):
    """Users that act until `stop` is called. Viewers reconnect for as long as they watch."""

    def __init__(self, world: World, most: int = 14) -> None:
        """`most` limits the number of sessions that are created."""
        super().__init__(world)
        self._most, self._created = most, 0
        self._stopped = False
        self._tenants = world.scale.tenant_names
        self._tenant_random = random.Random(f"users' tenants {world.seed}")
        """Choices of tenants, apart from all others: a world with one tenant needs none."""
        self._classes = world.scale.classes
        self._class_random = random.Random(f"users' classes {world.seed}")
        """Choices of classes and of targets of migrations, in a world of several classes."""
        self._pace_s = world.random.choice((0.3, 0.8, 2.0))
        self._spawn(self._act())

    def stop(self) -> None:
        self._stopped = True

    def end_all(self) -> None:
        """End all sessions, repeatedly: a gateway that was frozen may still create some."""
        self._spawn(self._end_all())

    async def _end_all(self) -> None:
        while True:
            for record in self._live():
                self._spawn(self.ask(_end(record.tenant, record.id)))
            await asyncio.sleep(1.0)

    def _live(self) -> list[SessionRecord]:
        return [record for record in self._world.records() if not record.phase.ended]

    async def _act(self) -> None:
        chance = self._world.random
        await asyncio.sleep(0.5)
        while True:
            await asyncio.sleep(chance.expovariate(1.0 / self._pace_s))
            if self._stopped:
                return
            live = self._live()
            action = chance.random()
            if self._created < self._most and (action < 0.4 or not live):
                self._created += 1
                self._spawn(self._begin())
            elif live:
                self._change(chance.choice(live), chance.random())

    async def _begin(self) -> None:
        chance = self._world.random
        seed = self.number()
        watchers = [chance.random() < 0.7 for _ in range(chance.choice((0, 1, 1, 1, 2)))]
        tenant = self._tenant_random.choice(self._tenants)
        attempts = chance.choice((1, 4))
        model = None if self._classes is None else self._class_random.choice(tuple(self._classes.sessions))
        record = await self.create(seed, attempts=attempts, pin=seed % 3 == 0, tenant=tenant, model=model)
        if record is None:
            return
        self.seeds[record.id] = seed
        for socket in watchers:
            self.watch(record.id, tenant, socket=socket, from_start=chance.random() < 0.5)

    def _change(self, record: SessionRecord, action: float) -> None:
        session, tenant = record.id, record.tenant
        if len(self._tenants) > 1 and self._tenant_random.random() < STRANGE:
            stranger = self._tenant_random.choice([name for name in self._tenants if name != tenant])
            self._spawn(self._trespass(session, stranger))
        if action < 0.3:
            number = self.number()
            key, drops = f"prompt-{number}", number % 3 == 0
            self._spawn(
                self.ask(
                    lambda g: g.sessions.prompt(tenant, session, "a blue square", key, drop_buffer=drops)
                )
            )
        elif action < 0.5 and record.activity is Activity.WATCHING:
            self._spawn(self.ask(lambda g: g.sessions.pause(tenant, session)))
        elif action < 0.7 and record.activity is not Activity.WATCHING:
            self._spawn(self.ask(lambda g: g.sessions.resume(tenant, session)))
        elif action < 0.78:
            self._spawn(self.ask(_end(tenant, session)))
        elif action < 0.88:
            self._come_or_go(session, tenant)
        else:
            target = None if self._classes is None else self._target()
            self._spawn(self.ask(lambda g: g.sessions.migrate(None, session, target), 1))

    def _target(self) -> str | None:
        """Choose the target of a migration: the best one, or any worker, also one of other classes."""
        workers = sorted(self._world.workers)
        return self._class_random.choice([None, *workers]) if self._class_random.random() < 0.5 else None

    async def _trespass(self, session: str, tenant: str) -> None:
        """Request another tenant's session in each way, as a user of `tenant`."""
        requests: list[Call] = [
            lambda g: g.sessions.get(tenant, session),
            lambda g: g.sessions.prompt(tenant, session, "a stranger's prompt", f"strange-{self.number()}"),
            lambda g: g.sessions.pause(tenant, session),
            lambda g: g.sessions.resume(tenant, session),
            _end(tenant, session),
        ]
        if await self.ask(self._tenant_random.choice(requests), 1) is not None:
            self._world.fail("tenants_apart", f"{tenant} is answered about {session}")
        if not any(viewer.session == session and viewer.tenant == tenant for viewer in self.viewers):
            # The viewer ends with its first answer, which is a refusal.
            self.watch(session, tenant, socket=self._tenant_random.random() < 0.5)

    def _come_or_go(self, session: str, tenant: str) -> None:
        there = [v for v in self.viewers if v.session == session and v.tenant == tenant]
        for viewer in there:
            viewer.watching = not viewer.watching
            if not viewer.watching:
                self.leave(viewer)
        if not there:
            self.watch(session, tenant)


def _end(tenant: str, session: str) -> Call:
    return lambda gateway: gateway.sessions.end(tenant, session)
