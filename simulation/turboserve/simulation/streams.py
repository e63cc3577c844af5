"""Streams of a known length in calm mode, and what their viewers receive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turboserve.contracts.chunks import ChunkHeader
from turboserve.gateway.auth.access import DEFAULT_TENANT as TENANT
from turboserve.gateway.settings import Settings as GatewaySettings
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.simulation.calm import (
    LATENCY_S,
    SHIPPED_COST_SAMPLE_S,
    SHIPPED_PROGRESS_S,
    SHIPPED_TIER_REPORT_S,
    STATEMENT_S,
    CalmScale,
)
from turboserve.simulation.faults import CALM
from turboserve.simulation.injector import FaultInjector
from turboserve.simulation.null_logging import quiet
from turboserve.simulation.player import Player, ViewerPause
from turboserve.simulation.runtime.broker import Network
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.users import Clients
from turboserve.simulation.world import World
from turboserve.worker.settings import Settings as WorkerSettings

STREAM_HEARTBEAT_S = 2.0
"""Time between two heartbeats of a worker: a quarter of the shipped lease."""
TICK_S = 0.5
"""Time between two ticks in which a worker retries failed actions."""
PLAYHEAD_S = float(GatewaySettings.model_fields["playhead_interval_s"].default)
"""Time between two reports of a playhead: the gateway's default."""
WARM_UP_S = 10.0
"""Time before the first arrival: all workers have loaded their models by then."""
PROMPT = "a blue square"
SWITCH_LOOK_S = 0.02
"""Least time between two looks at the playhead for the time of a switch."""
SWITCH_LATE_S = 0.1
"""Distance from the time of a switch beyond which the playhead has jumped over it."""
LOOK_S = 5.0
"""Interval at which a run checks whether all streams have ended."""
WORKER_NAMES = ("worker_id", "pool_member", "nats_user")
"""Settings of a worker that name it."""
ATTEMPTS = 100_000
"""Largest number of requests for one session: a refused stream asks again until the run ends."""


@dataclass(frozen=True)
class StreamPlan:
    """One stream: when it is requested, how long it is, and what its viewer does."""

    arrives_s: float
    chunks: int
    pauses: tuple[ViewerPause, ...] = ()
    switches: tuple[float, ...] = ()
    """Media times at which the viewer sets another prompt and discards what it has not seen. A time within a
    discarded part does not come."""


@dataclass(frozen=True)
class ReceivedChunk:
    """A chunk as its viewer receives it."""

    ready_s: float
    """Seconds since the stream was requested."""
    end_s: float
    """Media time at which the chunk ends."""
    quality: float
    """Relative to the best configuration's: 1 is the best."""
    in_time: bool
    skips: bool = False
    """Whether it is the first chunk under another prompt, to which the viewer skips."""


@dataclass
class StreamRecord:
    """What the viewer of one stream receives."""

    plan: StreamPlan
    received: list[ReceivedChunk] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    """Length of each stall, seconds."""
    switched: list[float] = field(default_factory=list)
    """Time of each switch, seconds since the stream was requested."""

    @property
    def complete(self) -> bool:
        """Whether all chunks have come."""
        return len(self.received) == self.plan.chunks


@dataclass(frozen=True)
class StreamScale(CalmScale):
    """Calm mode with settings and a device of the caller's choice.

    Viewers and gateways report playheads, and workers tiers, at the shipped intervals: a slack is only as
    exact as they are.
    """

    report_s: float = PLAYHEAD_S
    tick_s: float = TICK_S
    tier_report_s: float = SHIPPED_TIER_REPORT_S
    progress_s: float = SHIPPED_PROGRESS_S
    cost_sample_s: float = SHIPPED_COST_SAMPLE_S
    kept: Mapping[str, float] = field(default_factory=dict)
    device: DeviceProfile = field(default_factory=DeviceProfile)
    worker_settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the workers' settings that differ from calm mode's."""
    scheduler_settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the schedulers' settings that differ from calm mode's."""

    def worker(self, name: str, slot: str) -> WorkerSettings:
        given = super().worker(name, slot).model_dump(exclude_unset=True)
        # Settings are made once for all workers that only their names distinguish: to read them takes long.
        names = {field: given.pop(field) for field in WORKER_NAMES}
        loans = {"sequence_parallel_directory": self.host_of(slot)}
        made = self._of(WorkerSettings, **{**given, **loans, **self.worker_settings})
        return made.model_copy(update=names)

    def slowdown(self, member: str | None) -> float:
        return 1.0

    def gateway(self) -> GatewaySettings:
        return super().gateway().model_copy(update={"playhead_interval_s": PLAYHEAD_S})

    def scheduler(self) -> SchedulerSettings:
        return self._of(SchedulerSettings, **{"placement": self.placement, **self.scheduler_settings})

    def profile(self, load_s: float) -> DeviceProfile:
        slabs = self.slots - self.host_sessions
        return replace(self.device, load_s=load_s, slabs=slabs, host_states=self.slots)


class StreamUsers(Clients):
    """Clients that request each stream at its time, watch it, and end it when all chunks have come."""

    def __init__(self, world: World, plans: Sequence[StreamPlan], start_buffer_s: float) -> None:
        """`start_buffer_s`: time from the request at which a viewer begins to play."""
        super().__init__(world)
        self.records = [StreamRecord(plan) for plan in plans]
        self._start_buffer_s = start_buffer_s
        for number, record in enumerate(self.records, 1):
            self._spawn(self._plays(number, record))

    async def _plays(self, seed: int, record: StreamRecord) -> None:
        world, loop, plan = self._world, self._world.loop, record.plan
        await asyncio.sleep(WARM_UP_S + plan.arrives_s)
        arrived_s = loop.time()
        session = await self.create(seed, attempts=ATTEMPTS)
        if session is None:
            return
        log, ended = world.checker.log.of(session.id), asyncio.Event()
        player = Player(arrived_s + self._start_buffer_s, plan.pauses)
        viewer = self.watch(session.id)
        viewer.player = player
        record.stalls = player.stalls

        def received(index: int, end_s: float) -> None:
            header = log.chunks[index].header
            in_time = player.receive(loop.time(), end_s, header.drops_buffer)
            ready_s = loop.time() - arrived_s
            record.received.append(
                ReceivedChunk(ready_s, end_s, quality_of(header), in_time, header.drops_buffer)
            )
            if record.complete:
                ended.set()

        async def switches() -> None:
            for at_s in plan.switches:
                while (left_s := at_s - player.advance(loop.time())) > 0.0 or player.dropping:
                    await asyncio.sleep(max(SWITCH_LOOK_S, left_s))
                if left_s < -SWITCH_LATE_S or ended.is_set():
                    continue
                record.switched.append(loop.time() - arrived_s)
                player.drop_buffer(loop.time(), loop.time() + self._start_buffer_s)
                await self.ask(
                    lambda g: g.sessions.prompt(TENANT, session.id, PROMPT, None, drop_buffer=True)
                )

        viewer.on_chunk = received
        if plan.switches:
            self._spawn(switches())
        await ended.wait()
        self.leave(viewer)
        await self.ask(lambda g: g.sessions.end(TENANT, session.id))
        self.forget(viewer)


def quality_of(header: ChunkHeader) -> float:
    """Return a chunk's quality relative to the best configuration's."""
    chosen = header.fidelity
    return 1.0 if chosen is None or chosen.quality is None else chosen.quality


def run_streams(
    seed: int,
    scale: StreamScale,
    plans: Sequence[StreamPlan],
    start_buffer_s: float,
    longest_s: float,
    decided: Callable[[Sequence[StreamRecord]], bool] = lambda records: False,
) -> tuple[list[StreamRecord], dict[str, Any]]:
    """Simulate until every stream has all its chunks, or for `longest_s` of virtual time.

    `decided`: Whether what the streams have so far is enough for the caller. The run then ends early.

    Returns the streams, and counts and violations of the run.
    """
    device = replace(scale.device, chunks_of={number: plan.chunks for number, plan in enumerate(plans, 1)})
    chosen = replace(scale, device=device, times={"heartbeat_s": STREAM_HEARTBEAT_S})
    world = World(seed, CALM, chosen, False, Network(LATENCY_S))
    FaultInjector(world)
    world.postgres.behavior.statement_s = STATEMENT_S
    with quiet(world, handed_over=True):
        users = StreamUsers(world, plans, start_buffer_s)
        world.begin()
        records = users.records
        while world.loop.time() < longest_s and not all(record.complete for record in records):
            if decided(records):
                break
            world.loop.advance(LOOK_S)
        result = {
            "virtual_s": world.loop.time(),
            "counts": world.counts(),
            "violations": dict(world.checker.violations),
            "messages": list(world.checker.messages),
        }
        world.close()
    return users.records, result
