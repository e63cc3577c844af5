"""One system of the paper's figures in calm mode: the services' own code, chunks and viewers.

The count-level replay (`systems`) has sessions and workers but no chunks. Here the same trace, plant, setting
of the pool and policies run in whole deployments in virtual time.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.bench.report import percentile
from turboserve.contracts.pool import OrderPool
from turboserve.experiments.agreement.outcome import SeenChunk
from turboserve.experiments.agreement.simulated import TraceUsers, run_trace
from turboserve.experiments.autoscale.fleet import holder_with_room
from turboserve.experiments.autoscale.plant import Plant, Resume
from turboserve.experiments.autoscale.sizers import flat_table
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace
from turboserve.experiments.paper.grids import PoolSetting
from turboserve.experiments.paper.systems import System
from turboserve.experiments.slack.policies import POLICIES
from turboserve.experiments.slack.profiles import FORWARDS, GRADED_FLOOR, GRADED_QUALITY, NOTHING, ladder
from turboserve.gateway.settings import Settings as GatewaySettings
from turboserve.scheduler import app
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.placement import PLACEMENTS, Candidate, Choice, Cluster, Demand, Links, Placement
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.simulation import calm
from turboserve.simulation.null_logging import quiet
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.settings import POOL
from turboserve.simulation.streams import StreamScale
from turboserve.simulation.world import World
from turboserve.static_frozen import with_fields

FPS = 8
CHUNK_FRAMES = 12
CHUNK_S = CHUNK_FRAMES / FPS
"""Playing time of a chunk. K sessions of a worker are in real time: L(16) is 1.41 s on the H20. The paper
gives neither frames nor a rate."""
SETTLE_S = 5.0
"""Time from the readiness of the first workers until the trace begins. The pool's size is ordered until then,
as the replay begins."""
EARLY_S = 4.5
"""Time by which the sessions that are present at the beginning come before the trace."""
RESTART_EARLY_S = 3.5
"""Time before the trace at which the autoscaler starts again. The controller that decides then begins with
these sessions, as in the replay. To another one, they are a burst, for which the forecast keeps a margin over
its next 300 steps."""
RETRY_S = 0.5
TARGET_MARGIN = 1.0001
"""`target_chunk_s` relative to L(capacity): a worker's measured latency has rounding errors."""
SLACK = "ours"
"""The row of `bench slack` whose fidelity and rescues the system with slack has."""
HOST_STATES = 10_000
"""Suspended sessions in a worker's host memory: at the level of counts there is no limit."""


class ReturnsFirst(Placement):
    """Assigns a resumed session to the worker that holds its state if there is room; others as a new session.

    The counterpart of `Resume.RETURNS` at the level of counts.
    """

    def __init__(self, policy: Placement) -> None:
        self._policy = policy

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]:
        return self._policy.place(candidates, demands)

    def assign(self, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
        # Of several sessions that return to one last slot, the core places the first and repeats the others.
        found: dict[str, Choice] = {}
        for demand in demands:
            entry = holder_with_room(cluster, demand.holder)
            if entry is not None and entry.id not in demand.excluded:
                found[demand.session] = Choice(demand.session, entry.id, "it returns to its worker")
        others = [with_fields(each, holder=None) for each in demands if each.session not in found]
        if others:
            found |= {choice.session: choice for choice in self._policy.assign(cluster, others)}
        return [found[demand.session] for demand in demands]


@dataclass(frozen=True)
class PlantScale(StreamScale):
    """Workers of a declared plant. Reports are as rare as in calm mode, and start-ups as declared.

    Heartbeats are the shipped ones, since a worker learns of its drain by them.
    """

    report_s: float = calm.REPORT_S
    tick_s: float = calm.TICK_S
    tier_report_s: float = calm.TIER_REPORT_S
    progress_s: float = calm.PROGRESS_S
    cost_sample_s: float = calm.COST_SAMPLE_S
    kept: Mapping[str, float] = field(default_factory=lambda: dict(calm.KEPT))
    pool: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the autoscaler's settings that differ."""

    def gateway(self) -> GatewaySettings:
        return calm.CalmScale.gateway(self)

    def autoscaler(self) -> AutoscalerSettings:
        return super().autoscaler().model_copy(update=dict(self.pool))

    def profile(self, load_s: float) -> DeviceProfile:
        return self.device


def device_of(plant: Plant) -> DeviceProfile:
    """Return the device of a plant: the forwards of a chunk of n sessions take L(n)."""
    return DeviceProfile(
        forward_s={n: seconds / FORWARDS for n, seconds in plant.latency_s.items()},
        decode_s=NOTHING,
        text_s=NOTHING,
        recache_s=NOTHING,
        package_s=0.0,
        load_s=plant.start_up_s,
        slabs=max(plant.latency_s),
        host_states=HOST_STATES,
        host_bytes_per_s=1e12,
        denoising=FORWARDS - 1,
        fps=FPS,
        ladder=ladder(GRADED_QUALITY, GRADED_FLOOR),
    )


def scale_of(system: System, setting: PoolSetting, plant: Plant, begin: int, slack: bool) -> PlantScale:
    """Return the deployment. `plant` has K sessions a worker. `begin`: workers at the beginning."""
    most = max(plant.latency_s)
    scheduler: dict[str, Any] = {}
    if setting.capacity < most:
        scheduler["target_chunk_s"] = TARGET_MARGIN * plant.latency_s[setting.capacity]
    policy = POLICIES[SLACK]
    # Its unlimited lead is left out: these sessions have no end, and the other systems have the shipped one.
    fidelity = {"fidelity": policy.worker["fidelity"]} if slack else {}
    pool: dict[str, Any] = {"pool_min": setting.workers or 1}
    if system.elastic:
        pool |= {
            "scale_horizon_s": max(plant.start_up_s, 1.0),
            "scale_headroom": "profiled" if setting.rho else "learned",
        }
    return PlantScale(
        workers=begin,
        most_workers=setting.workers or plant.most,
        slots=most,
        placement=system.placement,
        gather=policy.gather,
        every_forward=True,
        device=device_of(plant),
        tier_report_s=calm.SHIPPED_TIER_REPORT_S if slack else calm.TIER_REPORT_S,
        worker_settings=fidelity,
        scheduler_settings={**scheduler, **(policy.scheduler if slack else {})},
        pool=pool,
    )


def core_of(system: System, resume: Resume, settings: SchedulerSettings) -> Scheduler:
    """Return a scheduler's core with the policies of a system."""
    if system.migrates == "events":
        core = app.core_of(settings)
    else:
        policy = replace(settings.policy(), rebalance=system.migrates != "never")
        core = Scheduler(PLACEMENTS.make(system.placement), policy, system.rebalancer(), Links())
    if resume is Resume.RETURNS:
        core.placement = ReturnsFirst(core.placement)
    return core


class OrderedPool(TraceUsers):
    """The users of a trace, and an operator who orders the size until it begins, and the table of ρ̂."""

    def __init__(self, world: World, trace: WorkloadTrace, begins_s: float, setting: PoolSetting) -> None:
        super().__init__(world, replace(trace, steps=tuple(map(_early, trace.steps))), begins_s)
        if not setting.workers:
            self._spawn(self._order(setting, begins_s))

    async def _order(self, setting: PoolSetting, begins_s: float) -> None:
        table = flat_table(setting.rho, predictive=setting.forecast) if setting.rho else None
        size = self._world.scale.workers
        await self._ordered(OrderPool(pool=POOL, change=("override", "table"), override=size, table=table))
        await self._until(begins_s - RESTART_EARLY_S)
        self._world.service("autoscaler-1").kill("the controller begins with the sessions that are present")
        await self._until(begins_s)
        await self._ordered(OrderPool(pool=POOL, change=("override",)))

    async def _until(self, time_s: float) -> None:
        await asyncio.sleep(time_s - self._world.loop.time())

    async def _ordered(self, order: OrderPool) -> None:
        while await self.ask(lambda gateway: gateway.pools.order(order)) is None:
            await asyncio.sleep(RETRY_S)


def _early(step: Step) -> Step:
    return step if step.at > 0 else replace(step, at=-EARLY_S)


def simulate(
    system: System,
    setting: PoolSetting,
    trace: WorkloadTrace,
    plant: Plant,
    seed: int,
    resume: Resume = Resume.BY_POLICY,
    slack: bool = False,
) -> dict[str, Any]:
    """Run one system in calm mode. `plant`: with K sessions a worker. Returns its figures, for JSON."""
    begin = setting.workers or setting.sizer(trace, setting.plant(plant)).target
    scale = scale_of(system, setting, plant, begin, slack)
    world, begins_s = calm.calm_world(seed, scale), plant.start_up_s + SETTLE_S
    world.core_of = partial(core_of, system, resume)
    world.fabric.bytes_per_s = scale.device.state_bytes / plant.migration_s
    with quiet(world, handed_over=True):
        users = OrderedPool(world, trace, begins_s, setting)
        found = run_trace(world, users, begins_s, trace.ends_s, again=False)
    during = [chunk for chunk in users.chunks if chunk.at_s >= 0]
    return {
        **_latencies(during, users.first_chunk_s),
        "late": found["late"] + sum(first_s > plant.target_s for first_s in users.first_chunk_s),
        "cost_worker_s": found["cost_worker_s"],
        "wanted_worker_s": wanted_worker_s(begin, found["actions"], trace.ends_s),
        "migrations": found["migrations"],
        "actions": len(found["actions"]),
        "chunks": len(during),
        "stall_s": found["stall_s"],
        "refused": found["refused"],
        "violations": sum(found["violations"].values()),
    }


def wanted_worker_s(begin: int, changes: Iterable[Sequence[float]], ends_s: float) -> float:
    """Return the integral of the wanted size. `changes`: (time, size), in order.

    The rest of the cost is that of workers that drain and end.
    """
    total, since, size = 0.0, 0.0, float(begin)
    for at, after in (*changes, (ends_s, 0.0)):
        total += size * (at - since)
        since, size = at, after
    return round(total, 3)


def _latencies(chunks: Sequence[SeenChunk], firsts_s: Sequence[float]) -> dict[str, Any]:
    """Return the latencies of chunks, the worst with the waits of new sessions, and the mean quality."""
    made_s = [chunk.waited_s + chunk.compute_s for chunk in chunks]
    return {
        "mean_ms": round(1000 * statistics.fmean(made_s), 3),
        "p50_ms": round(1000 * (percentile(made_s, 0.5) or 0.0), 3),
        "p95_ms": round(1000 * (percentile(made_s, 0.95) or 0.0), 3),
        "served_ms": round(1000 * max(made_s), 3),
        "with_waits_ms": round(1000 * max(*made_s, *firsts_s), 3),
        "sessions": len(firsts_s),
        "quality": round(statistics.fmean(chunk.quality for chunk in chunks), 5),
    }
