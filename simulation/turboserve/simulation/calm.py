"""A simulation without faults: declared latencies, any number of workers and sessions."""

from __future__ import annotations

import asyncio
import csv
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.gateway.auth.access import DEFAULT_TENANT as TENANT
from turboserve.gateway.settings import Settings as GatewaySettings
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.simulation.faults import CALM
from turboserve.simulation.injector import FaultInjector
from turboserve.simulation.names import INVARIANTS
from turboserve.simulation.null_logging import quiet
from turboserve.simulation.runtime.broker import Network
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.scenario import percentiles
from turboserve.simulation.settings import GATHER, PLACEMENT, REBALANCER, RESCUE_HORIZON_S, Scale
from turboserve.simulation.slow_devices import with_host_sessions
from turboserve.simulation.users import Clients
from turboserve.simulation.world import World
from turboserve.state_store.settings import Settings as StoreSettings
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.service.warm_up import BATCHES
from turboserve.worker.settings import Settings as WorkerSettings

LATENCY_S = 0.0
"""Latency of each message between a process and the broker: negligible against a chunk's time."""
STATEMENT_S = 0.002
"""Latency of each statement of the state store."""
PLAYHEAD_S = 1.25
"""Time between two reports of one session's playhead: the longest that the gateway's settings accept."""
REPORT_S = PLAYHEAD_S
"""Time between two reports of one viewer: what the gateway asks of its viewers."""
TIMES = {"heartbeat_s": 4.0, "lease_s": 16.0, "worker_timeout_s": 24.0}
"""Times of workers: twice the shipped lease and timeout, and heartbeats at a quarter of the lease."""
PROGRESS_S = 2.0
"""Time of chunks that the state store counts in one transaction. The process keeps so many headers parsed."""
COST_SAMPLE_S = 10.0
"""Time between two divisions of the workers' cost among sessions. Nothing in the run decides by it."""
SHIPPED_PROGRESS_S = float(StoreSettings.model_fields["progress_interval_s"].default)
SHIPPED_COST_SAMPLE_S = float(StoreSettings.model_fields["cost_sample_s"].default)
TICK_S = 2.0
"""Time between two ticks in which a worker retries failed actions. Without faults there are none."""
TIER_REPORT_S = 4.0
"""Time between two measurements of a worker's playout slack, with which each heartbeat has a new one."""
SHIPPED_TIER_REPORT_S = float(WorkerSettings.model_fields["tier_report_interval_s"].default)
KEPT = {"chunks_kept": 100, "events_retention_s": 300.0, "duplicate_window_s": 40.0}
"""What the logs keep. The process holds all of it in memory, and no viewer is as far behind."""
CHECKED_CHUNKS = 110
"""Newest chunks of a session that the checks keep: a few more than the log."""
ARRIVE_WITHIN_S = 60.0
"""Time within which all sessions arrive if no file of arrivals is given."""
FORGET_S = 10.0
"""Time after a session's end at which the checks drop its chunks: memory must not grow with arrivals."""
PROMPT_EVERY_S = 30.0
"""Mean time between two prompts of one session."""


@dataclass(frozen=True)
class SessionArrival:
    """Time at which one session is created, and how long it plays."""

    arrives_s: float
    plays_s: float


@dataclass(frozen=True)
class CalmScale(Scale):
    """Shipped settings, with these exceptions.

    There are four gateways and no limits of tenants and streams. Playheads, viewers and workers report at the
    intervals above.
    """

    gateways: int = 4
    report_s: float = REPORT_S
    every_forward: bool = False
    """Whether the engine takes one step per forward pass; otherwise it takes one per chunk."""
    tick_s: float = TICK_S
    tier_report_s: float = TIER_REPORT_S
    progress_s: float = PROGRESS_S
    cost_sample_s: float = COST_SAMPLE_S
    kept: Mapping[str, float] = field(default_factory=lambda: dict(KEPT))
    """Settings of the state store by what the logs keep."""

    def gateway(self) -> GatewaySettings:
        return self._of(GatewaySettings, playhead_interval_s=PLAYHEAD_S, stream_limit=100_000)

    def scheduler(self) -> SchedulerSettings:
        return self._of(
            SchedulerSettings,
            placement=self.placement,
            rebalancer=self.rebalancer,
            rescue_horizon_s=self.rescue_horizon_s,
        )

    def store(self) -> StoreSettings:
        # One tenant owns all sessions.
        return self._of(
            StoreSettings,
            max_sessions=100_000,
            tenant_sessions=0,
            tenant_suspended=0,
            tenant_creations_per_minute=0,
            progress_interval_s=self.progress_s,
            cost_sample_s=self.cost_sample_s,
            # Nothing decides by these, and the first one would fill the memory.
            chunk_history_s=0.0,
            behavior_s=0.0,
            **self.kept,
        )

    def autoscaler(self) -> AutoscalerSettings:
        return self._pool()

    def worker(self, name: str, slot: str) -> WorkerSettings:
        chosen = {
            "worker_tick_s": self.tick_s,
            "tier_report_interval_s": self.tier_report_s,
            # No worker fails, so no process would read them.
            "send_latents": False,
        }
        return super().worker(name, slot).model_copy(update=chosen)

    def profile(self, load_s: float) -> DeviceProfile:
        """Return the profile of a worker's device: real time with all slots taken."""
        most = self.slots
        forward = LatencyProfile({1: 0.03, most + 1: 0.1})
        # With the latency of one session alone, the scheduler takes two sessions for twice as slow as one and
        # fills the few workers that have measured more sizes. So the sizes of a warm-up are declared too.
        sizes = [size for size in BATCHES if size <= most]
        profile = DeviceProfile(
            forward_s={size: forward(size) for size in (*sizes, most + 1)},
            load_s=load_s,
            slabs=most,
            host_states=most,
            chunk_at_once=not self.every_forward,
        )
        return with_host_sessions(profile, self.host_sessions, self.state_copy_s)


class CalmUsers(Clients):
    """Clients that create each session at its time, watch and prompt it, and end it when it has played."""

    def __init__(self, world: World, arrivals: list[SessionArrival]) -> None:
        super().__init__(world)
        self.first_chunk_s: list[float] = []
        """Time from the request for a session to its first chunk."""
        self.refused = 0
        for number, arrival in enumerate(arrivals, 1):
            self._spawn(self._plays(number, arrival))

    async def _plays(self, seed: int, arrival: SessionArrival) -> None:
        world, loop = self._world, self._world.loop
        await asyncio.sleep(arrival.arrives_s)
        began = loop.time()
        record = await self.create(seed, attempts=10)
        if record is None:
            self.refused += 1
            return
        viewer = self.watch(record.id)
        viewer.on_first = lambda: self.first_chunk_s.append(loop.time() - began)
        until = began + arrival.plays_s
        while True:
            pause_s = world.random.expovariate(1.0 / PROMPT_EVERY_S)
            if loop.time() + pause_s >= until:
                break
            await asyncio.sleep(pause_s)
            await self.ask(lambda g: g.sessions.prompt(TENANT, record.id, "a blue square", None))
        await asyncio.sleep(max(0.0, until - loop.time()))
        self.leave(viewer)
        await self.ask(lambda g: g.sessions.end(TENANT, record.id))
        self.forget(viewer)
        # What was on its way to the viewer has arrived by then.
        await asyncio.sleep(FORGET_S)
        world.checker.log.forget(record.id)


def read_arrivals(path: Path) -> list[SessionArrival]:
    """Read rows of `arrives_s,plays_s`. Raises ValueError if a value is not a number."""
    with path.open(newline="") as file:
        return [
            SessionArrival(float(row["arrives_s"]), float(row["plays_s"])) for row in csv.DictReader(file)
        ]


def calm_world(seed: int, scale: CalmScale, keep_lines: bool = False) -> World:
    """Return a deployment without faults, whose messages take no time. None of its processes runs yet."""
    world = World(seed, CALM, scale, keep_lines, Network(LATENCY_S, immediate=True))
    FaultInjector(world)
    # One of the orders that a seed may draw. It takes no draws and keeps a process's memory in the caches.
    world.loop.fixed_order = True
    world.postgres.behavior.statement_s = STATEMENT_S
    world.postgres.behavior.at_commit = True
    world.checker.log.kept = CHECKED_CHUNKS
    world.hot.behavior.immediate = True
    return world


def run_calm(
    seed: int,
    workers: int,
    slots: int,
    sessions: int,
    seconds: float,
    arrivals: Path | None = None,
    keep_lines: bool = False,
    every_forward: bool = False,
    placement: str = PLACEMENT,
    gather: str = GATHER,
    rebalancer: str = REBALANCER,
    rescue_horizon_s: float = RESCUE_HORIZON_S,
    host_sessions: int = 0,
) -> dict[str, Any]:
    """Simulate `seconds` of virtual time. Returns the counts, the violations and the cost."""
    scale = CalmScale(
        workers=workers,
        most_workers=workers,
        slots=slots,
        times=TIMES,
        every_forward=every_forward,
        placement=placement,
        gather=gather,
        rebalancer=rebalancer,
        rescue_horizon_s=rescue_horizon_s,
        host_sessions=host_sessions,
        # Rescues decide by the tiers.
        tier_report_s=SHIPPED_TIER_REPORT_S if rescue_horizon_s else TIER_REPORT_S,
    )
    world = calm_world(seed, scale, keep_lines)
    if arrivals is None:
        chance = world.random
        coming = [SessionArrival(chance.uniform(0.0, ARRIVE_WITHIN_S), seconds) for _ in range(sessions)]
    else:
        coming = read_arrivals(arrivals)
    began, began_cpu = time.monotonic(), time.process_time()
    with quiet(world, handed_over=True):
        users = CalmUsers(world, coming)
        world.begin()
        world.loop.advance(seconds)
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
        checker, log = world.checker, world.checker.log
        result = {
            "mode": "calm",
            "seed": seed,
            "virtual_s": seconds,
            "placement": placement,
            "gather": gather,
            "rebalancer": rebalancer,
            "rescue_horizon_s": rescue_horizon_s,
            "engine_step": "forward" if every_forward else "chunk",
            "workers": workers,
            "host_sessions": host_sessions,
            "sessions": len(coming),
            "refused": users.refused,
            "violations": dict.fromkeys(INVARIANTS, 0) | dict(checker.violations),
            "messages": list(checker.messages),
            "digest": world.trace.digest,
            "counts": world.counts() | {"viewed": users.viewed},
            "first_chunk_s": percentiles(users.first_chunk_s),
            "events": world.loop.callbacks,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "events_per_s": world.loop.callbacks / wall_s,
            "events_per_cpu_s": world.loop.callbacks / max(cpu_s, 1e-9),
            "chunks_per_cpu_s": log.chunks / max(cpu_s, 1e-9),
        }
        if keep_lines:
            print("\n".join(world.trace.lines or ()))
        world.close()
    return result


def calm_table(result: Mapping[str, Any]) -> RenderableType:
    """Format the counts, the cost and the violations."""
    shown = Table("", "", box=box.SIMPLE, show_header=False)
    for name in ("virtual_s", "workers", "sessions", "refused", "events", "wall_s", "cpu_s"):
        shown.add_row(name, f"{result[name]:g}")
    for name, count in result["counts"].items():
        shown.add_row(name, str(count))
    shown.add_row("events per CPU second", f"{result['events_per_cpu_s']:.0f}")
    shown.add_row("chunks per CPU second", f"{result['chunks_per_cpu_s']:.0f}")
    notes = [f"{name}: {count}" for name, count in result["violations"].items() if count]
    return Group(shown, Text("\n".join([*notes, *result["messages"]]) or "no invariant was violated"))
