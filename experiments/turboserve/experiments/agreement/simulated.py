"""The simulated side: the services' own code on virtual time, in calm mode, with the real side's settings."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import NormalDist
from typing import Any, cast

from turboserve.autoscaler.control.events import SessionChange
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.bench.paced.model import CONFIG
from turboserve.bench.streaming.player import Player
from turboserve.experiments.agreement.declared import (
    CAPACITY,
    REPORT_S,
    SETTINGS,
    SETTLE_S,
    STATE_BYTES,
    Constants,
    Declared,
)
from turboserve.experiments.agreement.outcome import SeenChunk, figures
from turboserve.experiments.agreement.prediction import REPEATS
from turboserve.experiments.agreement.recording import Recorder
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace
from turboserve.gateway.auth.access import DEFAULT_TENANT as TENANT
from turboserve.gateway.settings import Settings as GatewaySettings
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.simulation.calm import LATENCY_S, STATEMENT_S, CalmScale
from turboserve.simulation.faults import CALM
from turboserve.simulation.injector import FaultInjector
from turboserve.simulation.null_logging import quiet
from turboserve.simulation.player import Player as SimulatedPlayer
from turboserve.simulation.runtime.broker import Network
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.streams import quality_of
from turboserve.simulation.users import Clients
from turboserve.simulation.world import World
from turboserve.state_store.settings import Settings as StoreSettings
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.settings import Settings as WorkerSettings

SEEDS = 1000
"""Number of draws whose repeats have other seeds."""
HOST_BYTES_PER_S = 2e9
"""Pace of copies of states in the memory of one machine."""


@dataclass(frozen=True)
class AgreementScale(CalmScale):
    """One process of each service, an elastic pool, and shipped settings but for `given`."""

    gateways: int = 1
    schedulers: int = 1
    times: dict[str, float] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=lambda: dict(SETTINGS))
    device: DeviceProfile = field(default_factory=DeviceProfile)
    least_workers: int = 1

    def gateway(self) -> GatewaySettings:
        return self._of(GatewaySettings, **self._declared(GatewaySettings))

    def scheduler(self) -> SchedulerSettings:
        return self._of(SchedulerSettings, placement=self.placement, **self._declared(SchedulerSettings))

    def store(self) -> StoreSettings:
        return self._of(StoreSettings, **self._declared(StoreSettings))

    def autoscaler(self) -> AutoscalerSettings:
        sizes = {"pool_size": self.least_workers, "pool_min": self.least_workers}
        return super().autoscaler().model_copy(update=sizes)

    def worker(self, name: str, slot: str) -> WorkerSettings:
        shipped = WorkerSettings.model_fields["real_time_margin"].default
        changed = {**self._declared(WorkerSettings), "real_time_margin": shipped}
        return super().worker(name, slot).model_copy(update=changed)

    def profile(self, load_s: float) -> DeviceProfile:
        return self.device

    def _declared(self, kind: type[Any]) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if name in kind.model_fields}


@dataclass(frozen=True)
class Disturbances:
    """How much slower than usual each worker computes. The factor is drawn again every `every_s` seconds.

    The logarithm is normal, since delays by other processes are rare and long.
    """

    p95: float
    """Relative to the median."""
    least: float
    """Computing is never faster than this, relative to the median: nothing disturbs it."""
    every_s: float

    def draw(self, random: Random) -> float:
        """Return a time relative to the median."""
        deviation = math.log(self.p95) / NormalDist().inv_cdf(0.95)
        return max(self.least, random.lognormvariate(0.0, deviation))


class _BenchPlayer:
    """The benchmarks' player, as the simulation's viewers report it."""

    def __init__(self) -> None:
        self.player = Player()

    def advance(self, now: float) -> float:
        """See `simulation.player.Player.advance`."""
        self.player.tick(now)
        return self.player.position_s


class TraceUsers(Clients):
    """Clients that make each session's changes at the times of a trace, and watch."""

    def __init__(self, world: World, trace: WorkloadTrace, begins_s: float) -> None:
        super().__init__(world)
        self.chunks: list[SeenChunk] = []
        self.players: list[Player] = []
        self.refused = 0
        self.first_chunk_s: list[float] = []
        """Time from the request for each session until its first chunk, or until it stops before that."""
        self._begins_s = begins_s
        self._random = Random(f"disturbances {world.seed}")
        for number, name in enumerate(trace.sessions, 1):
            steps = [step for step in trace.steps if step.session == name]
            self._spawn(self._plays(number, name, steps))

    def disturb(self, disturbances: Disturbances) -> None:
        """Let other processes of the machine disturb the workers."""
        self._spawn(self._disturb(disturbances))

    async def _disturb(self, disturbances: Disturbances) -> None:
        while True:
            for worker in self._world.workers.values():
                worker.slow_down(disturbances.draw(self._random))
            await asyncio.sleep(disturbances.every_s)

    async def _plays(self, number: int, name: str, steps: Sequence[Step]) -> None:
        world, loop = self._world, self._world.loop
        await asyncio.sleep(self._begins_s + steps[0].at - loop.time())
        asked_s: float | None = loop.time()
        record = await self.create(number, attempts=10)
        if record is None:
            self.refused += 1
            return
        log, shown = world.checker.log.of(record.id), _BenchPlayer()
        player = shown.player
        self.players.append(player)
        viewer = self.watch(record.id)
        viewer.player = cast(SimulatedPlayer, shown)

        def answered() -> None:
            nonlocal asked_s
            if asked_s is not None:
                self.first_chunk_s.append(loop.time() - asked_s)
                asked_s = None

        def received(index: int, end_s: float) -> None:
            answered()
            header = log.chunks[index].header
            player.arrived(index, header.start_s, end_s, loop.time())
            at_s = loop.time() - self._begins_s
            stages, quality = header.stages, quality_of(header)
            waited_s = 0.0 if stages is None else stages.due_s - stages.started_s
            self.chunks.append(
                SeenChunk(name, index, header.worker, header.compute_s, at_s, quality, waited_s)
            )

        viewer.on_chunk = received
        for step in steps[1:]:
            await asyncio.sleep(max(0.0, self._begins_s + step.at - loop.time()))
            answered()
            if step.kind is SessionChange.IDLING:
                await self.ask(lambda g: g.sessions.pause(TENANT, record.id))
                player.pause(True, loop.time())
            elif step.kind is SessionChange.ACTIVATION:
                await self.ask(lambda g: g.sessions.resume(TENANT, record.id))
                player.pause(False, loop.time())
            else:
                await self.ask(lambda g: g.sessions.end(TENANT, record.id))
                player.pause(True, loop.time())
                self.leave(viewer)
                self.forget(viewer)


def simulate_trace(
    scale: AgreementScale,
    trace: WorkloadTrace,
    seed: int,
    later_s: float = 0.0,
    disturbances: Disturbances | None = None,
) -> tuple[dict[str, Any], list[SeenChunk]]:
    """Play a trace in virtual time. Returns the figures and the chunks.

    `later_s`: time by which the trace begins later, so that it meets other moments of periodic work.
    """
    begins_s = scale.device.load_s + SETTLE_S + later_s
    world = World(seed, CALM, scale, False, Network(LATENCY_S))
    FaultInjector(world)
    world.postgres.behavior.statement_s = STATEMENT_S
    world.fabric.bytes_per_s = HOST_BYTES_PER_S
    with quiet(world):
        users = TraceUsers(world, trace, begins_s)
        if disturbances is not None:
            users.disturb(disturbances)
        found = run_trace(world, users, begins_s, trace.ends_s)
    return found, users.chunks


def run_trace(
    world: World, users: TraceUsers, begins_s: float, lasts_s: float, again: bool = True
) -> dict[str, Any]:
    """Run a deployment to the end of its users' trace, and close it. Returns the figures.

    `again`: see `figures`.
    """
    recorder = Recorder()
    world.on_scheduler, world.on_autoscaler = recorder.scheduler, recorder.autoscaler
    world.begin()
    world.loop.advance(begins_s + lasts_s)
    for player in users.players:
        player.tick(world.loop.time())
    found = figures(recorder.recordings, users.chunks, users.players, begins_s, lasts_s, again)
    found |= {"refused": users.refused, "violations": dict(world.checker.violations)}
    world.close()
    return found


def simulate(declared: Declared, constants: Constants, repeat: int = 0) -> dict[str, Any]:
    """Simulate a run with the constants of the real stack. `repeat`: another seed, and another beginning."""
    size, forward = declared.size, LatencyProfile(declared.forward_s)
    device = DeviceProfile(
        forward_s={b: forward(b) + constants.forward_extra_s for b in range(1, CAPACITY + 1)},
        decode_s={1: 1e-3},
        package_s=1e-3,
        host_bytes_per_s=HOST_BYTES_PER_S,
        state_bytes=STATE_BYTES,
        load_s=constants.start_s,
        slabs=CAPACITY,
        host_states=2 * CAPACITY,
        fps=CONFIG.fps,
    )
    scale = AgreementScale(
        workers=size.workers,
        most_workers=size.workers,
        least_workers=size.least,
        slots=CAPACITY,
        placement=declared.policy,
        report_s=REPORT_S,
        device=device,
        every_forward=True,
    )
    seed, later_s = declared.draw + SEEDS * repeat, repeat / REPEATS
    return simulate_trace(scale, size.trace(declared.draw), seed, later_s)[0]
