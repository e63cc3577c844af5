"""OServe's switching of weights (Algorithm 2): every shard's source is chosen before the first is sent."""

from __future__ import annotations

from collections import Counter, deque

from turboserve.worker.weight_transfer.plan_messages import (
    PlanCommand,
    PlanEvent,
    PlanLimits,
    SendShard,
    ShardVerified,
    WorkerJoined,
)


class OServePlan:
    """The paper's greedy, carried out under the same limits as ours.

    A source is a holder on the receiver's host, or else any. Receivers do not become sources. A source sends
    in the order of the plan, and passes over receivers that receive as much as they may.
    """

    def __init__(self, shards: int, shard_bytes: int, limits: PlanLimits, *, in_total: bool) -> None:
        """`in_total`: count what a source has sent to all (the paper's text), or to this receiver (its
        algorithm)."""
        self._shards, self._shard_bytes, self._limits, self._in_total = shards, shard_bytes, limits, in_total
        self._hosts: dict[str, str] = {}
        self._holders: list[str] = []
        self._receivers: list[str] = []
        self._planned: dict[str, deque[SendShard]] = {}
        self._sending: Counter[str] = Counter()
        self._receiving: Counter[str] = Counter()
        self._flows: dict[tuple[str, int], str] = {}

    def handle(self, event: PlanEvent, now: float) -> list[PlanCommand]:
        """See `TransferPlan.handle`. Only joins and arrivals have an effect."""
        match event:
            case WorkerJoined(worker=worker, host=host):
                self._hosts[worker] = host
                (self._receivers if event.receives else self._holders).append(worker)
                return []
            case ShardVerified(receiver=receiver, shard=shard):
                self._sending[self._flows.pop((receiver, shard))] -= 1
                self._receiving[receiver] -= 1
        if not self._planned and self._receivers:
            self._plan()
        return self._start()

    def _plan(self) -> None:
        self._planned = {holder: deque() for holder in self._holders}
        volumes: Counter[tuple[str, str]] = Counter()
        for shard in range(self._shards):
            for receiver in self._receivers:
                near = [one for one in self._holders if self._hosts[one] == self._hosts[receiver]]
                to = "" if self._in_total else receiver
                source = min(near or self._holders, key=lambda one: volumes[one, to])
                volumes[source, to] += self._shard_bytes
                self._planned[source].append(SendShard(source, receiver, shard))

    def _start(self) -> list[PlanCommand]:
        begun: list[PlanCommand] = []
        for source, queue in self._planned.items():
            for command in [*queue]:
                if self._sending[source] >= self._limits.sends:
                    break
                if self._receiving[command.receiver] < self._limits.receives:
                    queue.remove(command)
                    self._sending[source] += 1
                    self._receiving[command.receiver] += 1
                    self._flows[command.receiver, command.shard] = source
                    begun.append(command)
        return begun
