"""The plan of weight transfers: every receiver gets every shard, whatever happens, within the limits."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.worker.weight_transfer.plan import TransferPlan
from turboserve.worker.weight_transfer.plan_messages import (
    CancelShard,
    FailureReason,
    PlanEvent,
    PlanLimits,
    ReadFromDisk,
    SendShard,
    ShardFailed,
    ShardVerified,
    SlackChanged,
    TimePassed,
    WeightsComplete,
    WorkerJoined,
    WorkerLost,
)


class Cluster:
    """Workers that do what a plan says, and a second account of who holds what."""

    def __init__(self, shards: int, limits: PlanLimits) -> None:
        self.plan = TransferPlan([10 + shard for shard in range(shards)], limits)
        self.shards, self.limits, self.now = set(range(shards)), limits, 0.0
        self.holds: dict[str, set[int]] = {}
        self.hosts: dict[str, str] = {}
        self.sends: dict[str, int] = {}
        self.needing: set[str] = set()
        self.flows: list[SendShard] = []
        self.failures: Counter[tuple[str, str]] = Counter()
        self.joined: dict[str, float] = {}
        self.last: dict[str, float] = {}
        """When each receiver last joined, or ended to receive something. What was put off does not count."""
        self.complete: list[str] = []
        self.disk: list[str] = []

    def tell(self, event: PlanEvent) -> None:
        for command in self.plan.handle(event, self.now):
            match command:
                case SendShard():
                    self._begin(command)
                case CancelShard():
                    self.flows.remove(SendShard(command.source, command.receiver, command.shard))
                case WeightsComplete(receiver=receiver):
                    assert self.holds[receiver] == self.shards
                    self.needing.remove(receiver)
                    self.complete.append(receiver)
                case ReadFromDisk(receiver=receiver, shard=shard):
                    self._reads_disk(receiver, shard)

    def _begin(self, flow: SendShard) -> None:
        assert flow.shard in self.holds[flow.source]
        assert flow.receiver in self.needing
        assert flow.shard not in self.holds[flow.receiver]
        assert flow.source != flow.receiver
        assert (flow.receiver, flow.shard) not in {(one.receiver, one.shard) for one in self.flows}
        assert self.failures[flow.source, flow.receiver] < self.limits.failures
        self.flows.append(flow)
        sending = sum(one.source == flow.source for one in self.flows)
        assert sending <= min(self.limits.sends, self.sends[flow.source])
        assert sum(one.receiver == flow.receiver for one in self.flows) <= self.limits.receives
        near = {
            name
            for name, host in self.hosts.items()
            if host == self.hosts[flow.receiver]
            and flow.shard in self.holds[name]
            and self.sends[name]
            and self.failures[name, flow.receiver] < self.limits.failures
        }
        assert not near or flow.source in near

    def _reads_disk(self, receiver: str, shard: int) -> None:
        assert not any(flow.receiver == receiver for flow in self.flows)
        helpers = [
            name
            for name, holds in self.holds.items()
            if shard in holds and self.failures[name, receiver] < self.limits.failures
        ]
        waited = self.now - self.last[receiver] >= self.limits.wait_s
        size = sum(10 + shard for shard in self.shards)
        late = self.now - self.joined[receiver] >= self.limits.wait_s + size / self.limits.least_bytes_per_s
        assert waited or late or not helpers
        self.needing.remove(receiver)
        self.disk.append(receiver)

    def join(self, name: str, host: str, holds: set[int], *, receives: bool) -> None:
        self.holds[name], self.hosts[name], self.sends[name] = set(holds), host, self.limits.sends
        self.last[name] = self.joined[name] = self.now
        if receives:
            self.needing.add(name)
        self.tell(WorkerJoined(name, host, frozenset(holds), receives))

    def lose(self, name: str) -> None:
        self.needing.discard(name)
        del self.holds[name], self.hosts[name], self.sends[name]
        for flow in self.flows:
            if flow.source == name:
                self.last[flow.receiver] = self.now
        self.tell(WorkerLost(name))
        assert not any(name in (flow.source, flow.receiver) for flow in self.flows)

    def end(self, place: int, outcome: FailureReason | Literal["verified"]) -> None:
        """End one of the flows, as the network might."""
        flow = self.flows.pop(place % len(self.flows))
        if outcome == "verified":
            self.holds[flow.receiver].add(flow.shard)
            self.last[flow.receiver] = self.now
            self.tell(ShardVerified(flow.receiver, flow.shard))
            return
        if outcome != "postponed":
            self.failures[flow.source, flow.receiver] += 1
            self.last[flow.receiver] = self.now
        if outcome == "corrupt":
            self.holds[flow.source].discard(flow.shard)
        if outcome == "postponed":
            self.sends[flow.source] = 0
            self.tell(SlackChanged(flow.source, 0))
        self.tell(ShardFailed(flow.receiver, flow.shard, outcome))

    def finish(self) -> None:
        """Let everything that is under way succeed, until nothing is needed any more."""
        for name in self.holds:
            self.sends[name] = self.limits.sends
            self.tell(SlackChanged(name, self.limits.sends))
        while self.needing:
            if self.flows:
                self.end(0, "verified")
            else:
                self.now += self.limits.wait_s
                self.tell(TimePassed())
                assert self.flows or not self.needing
        assert not self.flows


LIMITS = st.builds(
    PlanLimits,
    sends=st.integers(1, 3),
    receives=st.integers(1, 3),
    failures=st.integers(1, 3),
    wait_s=st.just(20.0),
    least_bytes_per_s=st.sampled_from([1.0, 1e9]),
)
OUTCOMES = st.sampled_from(["verified", "verified", "verified", "broken", "corrupt", "postponed"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("end"), st.integers(0, 20), OUTCOMES),
        st.tuples(st.just("lose"), st.integers(0, 20)),
        st.tuples(st.just("slack"), st.integers(0, 20), st.integers(0, 3)),
        st.tuples(st.just("join"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("wait"), st.floats(0, 15)),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(
    shards=st.integers(1, 6),
    limits=LIMITS,
    holders=st.lists(st.integers(0, 2), min_size=0, max_size=3),
    receivers=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    steps=STEPS,
)
def test_every_receiver_ends_with_every_shard_or_reads_its_disk(
    shards: int, limits: PlanLimits, holders: list[int], receivers: list[int], steps: list[Any]
) -> None:
    cluster = Cluster(shards, limits)
    for number, host in enumerate(holders):
        cluster.join(f"h{number}", f"host{host}", cluster.shards, receives=False)
    for number, host in enumerate(receivers):
        cluster.join(f"r{number}", f"host{host}", set(), receives=True)
    joined = len(receivers)
    for step in steps:
        names = sorted(cluster.holds)
        match step:
            case "end", place, outcome if cluster.flows:
                cluster.end(place, outcome)
            case "lose", place if names:
                cluster.lose(names[place % len(names)])
            case "slack", place, sends if names:
                name = names[place % len(names)]
                cluster.sends[name] = min(sends, limits.sends)
                cluster.tell(SlackChanged(name, sends))
            case "join", host, receives:
                holds = set() if receives else cluster.shards
                cluster.join(f"j{joined}", f"host{host}", holds, receives=receives)
                joined += 1
            case "wait", seconds:
                cluster.now += seconds
                cluster.tell(TimePassed())
    cluster.finish()
    assert len(cluster.complete) == len(set(cluster.complete))
    assert not set(cluster.complete) & set(cluster.disk)


def started(cluster: Cluster) -> list[tuple[str, str, int]]:
    return [(flow.source, flow.receiver, flow.shard) for flow in cluster.flows]


ONE_EACH = PlanLimits(sends=1, receives=1)


def test_the_holder_that_has_sent_least_sends_next() -> None:
    cluster = Cluster(4, ONE_EACH)
    cluster.join("a", "x", cluster.shards, receives=False)
    cluster.join("b", "y", cluster.shards, receives=False)
    cluster.join("r", "z", set(), receives=True)
    sources = []
    for _ in range(4):
        sources.append(cluster.flows[0].source)
        cluster.end(0, "verified")
    assert sorted(sources) == ["a", "a", "b", "b"]
    assert cluster.complete == ["r"]


def test_a_receiver_sends_what_it_has_verified_and_gets_from_its_host_what_is_there() -> None:
    cluster = Cluster(2, PlanLimits(sends=2, receives=1))
    cluster.join("far", "x", cluster.shards, receives=False)
    cluster.join("r0", "y", set(), receives=True)
    cluster.join("r1", "y", set(), receives=True)
    # Each gets another shard over the network, then they exchange them.
    assert {(flow.source, flow.shard) for flow in cluster.flows} == {("far", 0), ("far", 1)}
    cluster.end(0, "verified")
    cluster.end(0, "verified")
    assert {(flow.source, flow.receiver) for flow in cluster.flows} == {("r0", "r1"), ("r1", "r0")}


def test_a_source_whose_viewers_lack_slack_sends_later() -> None:
    cluster = Cluster(2, ONE_EACH)
    cluster.join("a", "x", cluster.shards, receives=False)
    cluster.sends["a"] = 0
    cluster.tell(SlackChanged("a", 0))
    cluster.join("r", "y", set(), receives=True)
    assert not cluster.flows
    cluster.now = 19.0
    cluster.tell(TimePassed())
    assert not cluster.disk
    cluster.sends["a"] = 1
    cluster.tell(SlackChanged("a", 1))
    assert len(cluster.flows) == 1
    cluster.sends["a"] = 0
    cluster.tell(SlackChanged("a", 0))
    cluster.end(0, "verified")
    cluster.now = 40.0
    cluster.tell(TimePassed())
    assert cluster.disk == ["r"]


def test_a_source_that_always_puts_the_receiver_off_does_not_keep_it_waiting() -> None:
    """Incident: each new request began the wait again, and a worker beside a busy one never started."""
    cluster = Cluster(2, PlanLimits(sends=1, receives=1, wait_s=20.0, least_bytes_per_s=1e-3))
    cluster.join("a", "x", cluster.shards, receives=False)
    cluster.join("r", "y", set(), receives=True)
    cluster.now = 15.0
    cluster.end(0, "verified")
    while cluster.needing and cluster.now < 100.0:
        cluster.end(0, "postponed")
        cluster.now += 0.5
        cluster.sends["a"] = 1
        cluster.tell(SlackChanged("a", 1))
    assert cluster.disk == ["r"]
    assert cluster.now == pytest.approx(35.0, abs=0.5)


def test_sources_that_help_too_slowly_do_not_keep_a_receiver_waiting() -> None:
    limits = PlanLimits(sends=1, receives=1, wait_s=20.0, least_bytes_per_s=100.0)
    cluster = Cluster(100, limits)
    cluster.join("a", "x", cluster.shards, receives=False)
    cluster.join("r", "y", set(), receives=True)
    whole_s = limits.whole_s(sum(10 + shard for shard in range(100)))
    while cluster.needing:
        cluster.now += 15.0
        cluster.end(0, "verified")
    # What was on its way was canceled.
    assert cluster.disk == ["r"]
    assert whole_s <= cluster.now < whole_s + 15.0
    assert not cluster.flows


def test_a_death_costs_what_the_dead_worker_held_and_nothing_else() -> None:
    cluster = Cluster(3, ONE_EACH)
    cluster.join("a", "x", cluster.shards, receives=False)
    cluster.join("b", "y", cluster.shards, receives=False)
    cluster.join("r", "z", set(), receives=True)
    cluster.end(0, "verified")
    [flow] = cluster.flows
    cluster.lose(flow.source)
    # The other holder sends that shard; nothing that is verified is sent again.
    [again] = cluster.flows
    assert again.source in cluster.holds
    cluster.finish()
    assert cluster.complete == ["r"]


def test_a_source_with_corrupt_bytes_is_not_asked_for_them_again() -> None:
    cluster = Cluster(2, ONE_EACH)
    cluster.join("a", "x", cluster.shards, receives=False)
    cluster.join("r", "z", set(), receives=True)
    cluster.end(0, "corrupt")
    assert cluster.disk == ["r"]
    assert not cluster.flows
