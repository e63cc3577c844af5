"""Transfers of weights in virtual time: what a plan's commands take on declared networks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turboserve.worker.weight_transfer.plan import TransferPlan
from turboserve.worker.weight_transfer.plan_messages import (
    CancelShard,
    PlanCommand,
    PlanEvent,
    PlanLimits,
    SendShard,
    ShardVerified,
    SlackChanged,
    TimePassed,
    WorkerJoined,
    WorkerLost,
)


@dataclass(frozen=True)
class Fleet:
    """Workers that hold a model's weights, workers that need them, and their network."""

    holders: tuple[str, ...]
    """The host of each worker that holds all shards."""
    receivers: tuple[str, ...]
    """The host of each worker that needs all shards."""
    shards: int
    shard_bytes: int
    near_bytes_per_s: float
    """Rate of a worker's connections within its host, each direction, bytes per second."""
    far_bytes_per_s: float
    """Rate of a worker's connections to other hosts, each direction, bytes per second."""

    def hosts(self) -> dict[str, str]:
        """Host of each worker: holders `h0`, `h1`, …, receivers `r0`, `r1`, …"""
        named = {f"h{number}": host for number, host in enumerate(self.holders)}
        return named | {f"r{number}": host for number, host in enumerate(self.receivers)}


class Planner(Protocol):
    """Decides on transfers: `TransferPlan`, or a baseline."""

    def handle(self, event: PlanEvent, now: float) -> list[PlanCommand]:
        """See `TransferPlan.handle`."""
        ...


@dataclass
class Flow:
    """One shard on its way."""

    command: SendShard
    left_bytes: float
    near: bool


@dataclass
class VirtualResult:
    """What a plan took."""

    seconds: float = 0.0
    """When the last receiver had everything; infinite if one never had."""
    sent_bytes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By worker."""
    far_bytes: float = 0.0
    """Bytes between hosts."""
    short_bytes: float = 0.0
    """Bytes that workers sent while their viewers lacked slack."""


def new_plan(fleet: Fleet, limits: PlanLimits) -> TransferPlan:
    """The product's plan for a fleet's shards."""
    return TransferPlan([fleet.shard_bytes] * fleet.shards, limits)


def run(fleet: Fleet, planner: Planner, events: Sequence[tuple[float, PlanEvent]] = ()) -> VirtualResult:
    """Carry out a planner's commands until every receiver has everything.

    The flows of a worker share its rate. `events`: what else happens, with its time, in order of time. Events
    at 0 happen before the first receiver starts.
    """
    hosts, result, flows = fleet.hosts(), VirtualResult(), list[Flow]()
    holds: dict[str, set[int]] = {
        name: set(range(fleet.shards)) if name[0] == "h" else set() for name in hosts
    }
    needing = {name for name in hosts if name[0] == "r"}
    short: set[str] = set()
    now, coming = 0.0, list(events)

    def obey(commands: Sequence[PlanCommand]) -> None:
        for command in commands:
            if isinstance(command, SendShard):
                assert command.shard in holds[command.source], command
                near = hosts[command.source] == hosts[command.receiver]
                flows.append(Flow(command, fleet.shard_bytes, near))
            elif isinstance(command, CancelShard):
                ended = SendShard(command.source, command.receiver, command.shard)
                flows[:] = [flow for flow in flows if flow.command != ended]

    def take(event: PlanEvent) -> list[PlanCommand]:
        if isinstance(event, SlackChanged):
            (short.discard if event.sends else short.add)(event.worker)
        if isinstance(event, WorkerLost):
            needing.discard(event.worker)
        return planner.handle(event, now)

    for name, host in hosts.items():
        if name not in needing:
            obey(planner.handle(WorkerJoined(name, host, sorted(holds[name])), now))
    # What has happened before the first receiver starts.
    while coming and coming[0][0] <= now:
        obey(take(coming.pop(0)[1]))
    for name in sorted(needing):
        obey(planner.handle(WorkerJoined(name, hosts[name], receives=True), now))
    obey(planner.handle(TimePassed(), now))
    while needing:
        rates = _rates(fleet, flows)
        ends = [flow.left_bytes / rate for flow, rate in zip(flows, rates, strict=True)]
        step = min([*ends, *(at - now for at, _ in coming[:1])], default=math.inf)
        if step == math.inf:
            now = math.inf
            break
        for flow, rate in zip(flows, rates, strict=True):
            flow.left_bytes -= rate * step
            result.sent_bytes[flow.command.source] += rate * step
            result.far_bytes += 0.0 if flow.near else rate * step
            result.short_bytes += rate * step if flow.command.source in short else 0.0
        now += step
        if coming and coming[0][0] <= now + 1e-12:
            obey(take(coming.pop(0)[1]))
            continue
        # Flows that end at the same time are in the order in which they began.
        done = [flow for flow in flows if flow.left_bytes <= 1e-6 * fleet.shard_bytes]
        flows[:] = [flow for flow in flows if flow not in done]
        for flow in done:
            receiver, shard = flow.command.receiver, flow.command.shard
            holds[receiver].add(shard)
            if len(holds[receiver]) == fleet.shards:
                needing.discard(receiver)
            obey(planner.handle(ShardVerified(receiver, shard), now))
        obey(planner.handle(TimePassed(), now))
    result.seconds = now
    return result


def _rates(fleet: Fleet, flows: Sequence[Flow]) -> list[float]:
    sends = Counter((flow.command.source, flow.near) for flow in flows)
    receives = Counter((flow.command.receiver, flow.near) for flow in flows)
    return [
        (fleet.near_bytes_per_s if flow.near else fleet.far_bytes_per_s)
        / max(sends[flow.command.source, flow.near], receives[flow.command.receiver, flow.near])
        for flow in flows
    ]
