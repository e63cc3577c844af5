"""Slack in the scheduler by example: extrapolation, expected late chunks, rescues, and Algorithm 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.migrations_bench import Bench, session, worker
from turboserve.baselines.rehoming import AlgorithmOne, FewestStreams
from turboserve.contracts.fidelity import SessionSlack, Tier
from turboserve.contracts.workers import HeldSession, LoadReport
from turboserve.scheduler.app import core_of
from turboserve.scheduler.messages import LoadReported
from turboserve.scheduler.placement import (
    Candidate,
    Cluster,
    Demand,
    Migration,
    MigrationKind,
    MinMaxRebalancer,
    ReportedSlack,
    SessionState,
    Weights,
    WorkerState,
)
from turboserve.scheduler.placement.lateness import _batch, late_chunks
from turboserve.scheduler.placement.pool import LatencyCurve
from turboserve.scheduler.placement.urgency import EXTRAPOLATE_S, slack_at
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.worker.engine.gather import ALPHA, LatencyProfile, LeastCreditFirst
from turboserve.worker.engine.gather import Candidate as Row
from turboserve.worker.settings import Settings as WorkerSettings

ALONE = {n: 0.5 * n for n in range(1, 9)}
"""A compute-bound profile: batches save nothing."""
BATCHED = {n: 0.4 + 0.05 * n for n in range(1, 9)}
HORIZON_S = 6.0
NO_HOSTS: Mapping[str, str] = {}
"""Each worker is then on a host of its own."""


def test_slack_falls_while_the_viewer_plays_until_the_worker_must_have_made_a_chunk() -> None:
    known = ReportedSlack(slack_s=2.0, credit_s=1.2, at=10.0)
    assert slack_at(known, 10.0) == 2.0
    assert slack_at(known, 10.5) == pytest.approx(1.5)
    # R + T = 0.8 s.
    assert slack_at(known, 11.5) == pytest.approx(1.2)
    # A clock is never behind a report, but a proposal may be computed for any time.
    assert slack_at(known, 9.0) == 2.0


def test_slack_is_extrapolated_for_a_bounded_time_and_only_while_the_viewer_plays() -> None:
    slow = ReportedSlack(slack_s=9.0, credit_s=-9.0, at=0.0)
    assert slack_at(slow, 1e9) == 9.0 - EXTRAPOLATE_S
    assert slack_at(replace(slow, playing=False), 1e9) == 9.0
    # A negative T is no forecast.
    assert slack_at(replace(slow, credit_s=12.0), 5.0) == 9.0


@pytest.mark.parametrize(
    ("profile", "slacks_s", "horizon_s", "late"),
    [
        (ALONE, [], 6.0, 0),
        # One session, 0.5 s for a chunk of 0.75 s: never late.
        (ALONE, [0.5], 6.0, 0),
        # The first chunk finishes at 0.5; its delay shifts the others, which are in time.
        (ALONE, [0.4], 6.0, 1),
        # Due at 0.6 and 1.0, finished at 0.5 and 1.0; then due at 1.35 and 1.75, finished at 1.5 and 2.0.
        (ALONE, [0.6, 1.0], 1.0, 0),
        (ALONE, [0.6, 1.0], 1.4, 1),
        (ALONE, [0.6, 1.0], 1.8, 2),
        # Full buffers cover three seconds.
        (ALONE, [3.0, 3.0], 3.0, 0),
        # Three on one worker get 12 chunks in 6 s, all late, and need 24.
        (ALONE, [0.0, 0.0, 0.0], 6.0, 24),
        # A batch of both takes 0.5 s.
        (BATCHED, [0.5, 0.5], 6.0, 0),
        (BATCHED, [0.48, 0.5], 6.0, 1),
        # Due already.
        (BATCHED, [-1.0], 6.0, 1),
    ],
)
def test_late_chunks_by_hand(
    profile: dict[int, float], slacks_s: list[float], horizon_s: float, late: int
) -> None:
    assert late_chunks(LatencyCurve(profile, 8), slacks_s, horizon_s) == late


slacks = st.lists(st.floats(-2.0, 4.0).map(lambda s: round(s, 2)), max_size=6)
profiles = st.tuples(st.sampled_from((0.0, 0.1, 0.4, 0.9)), st.sampled_from((0.05, 0.2, 0.7))).map(
    lambda line: {n: line[0] + line[1] * n for n in range(1, 9)}
)


@given(profiles, slacks, st.floats(0.5, 12.0))
@settings(deadline=None)
def test_the_count_is_bounded_and_ignores_the_order(
    profile: dict[int, float], slacks_s: list[float], horizon_s: float
) -> None:
    curve = LatencyCurve(profile, 8)
    late = late_chunks(curve, slacks_s, horizon_s)
    assert 0 <= late <= sum(1 + (horizon_s - max(s, 0.0)) / 0.75 for s in slacks_s if s < horizon_s)
    assert late_chunks(curve, list(reversed(slacks_s)), horizon_s) == late
    assert late_chunks(curve, [s + 1e3 for s in slacks_s], horizon_s) == 0


@given(profiles, st.lists(st.floats(-1.0, 3.0), min_size=1, max_size=6))
@settings(deadline=None)
def test_batches_are_those_of_the_worker(profile: dict[int, float], slacks_s: list[float]) -> None:
    slacks_s = sorted(slacks_s)
    rows = [
        Row(str(n), 3, 0, 1, waiting_s=0.0, slack_s=slack, credit_s=slack) for n, slack in enumerate(slacks_s)
    ]
    chosen = LeastCreditFirst().gather(rows, LatencyProfile(profile), len(rows))
    assert [row.session for row in chosen] == [str(n) for n in range(len(chosen))]
    assert _batch(LatencyCurve(profile, 8), slacks_s, len(slacks_s), 0.0) == len(chosen)


def cluster(
    given_: dict[str, list[float]], profile: dict[int, float] = ALONE, hosts: Mapping[str, str] = NO_HOSTS
) -> Cluster:
    """Build workers by the slacks of their sessions, reported at 0 s. K is 6. Sessions are NAME-INDEX."""
    made = Cluster()
    for name, slacks_s in given_.items():
        state = WorkerState(name, "m", 6, chunk_latency_s=profile, host=hosts.get(name, name))
        made.put_worker(state)
        for index, slack_s in enumerate(slacks_s):
            made.put_session(SessionState(f"{name}-{index}", "m", name))
            made.put_slack(f"{name}-{index}", ReportedSlack(slack_s, slack_s - 0.5, 0.0, tier(slack_s)))
    return made


def tier(slack_s: float) -> Tier:
    credit_s = slack_s - 0.5
    return Tier.URGENT if credit_s < 1.0 else Tier.NORMAL if credit_s <= 2.0 else Tier.RELAXED


def proposed(there: Cluster, now: float = 0.0, **weights: object) -> list[Migration]:
    chosen = {"rescue_horizon_s": HORIZON_S, **weights}
    return MinMaxRebalancer(Weights(**chosen)).propose(there, now)  # type: ignore[arg-type]


def test_an_urgent_session_leaves_for_a_relaxed_worker_although_the_counts_are_equal() -> None:
    there = cluster({"a": [0.23, 0.3], "b": [3.0, 3.0]}, {n: 0.24 * n for n in range(1, 9)})
    assert proposed(there, rescue_horizon_s=0.0) == []
    [migration] = proposed(there)
    assert (migration.source, migration.target, migration.kind) == ("a", "b", MigrationKind.RESCUE)
    numbers = migration.numbers
    assert numbers["late_chunks"] > numbers["late_chunks_after"]
    assert numbers["horizon_s"] == HORIZON_S
    assert "late chunks expected on a and b within 6 s: " in migration.reason


def test_nothing_is_rescued_where_all_are_in_time_or_all_are_late() -> None:
    assert proposed(cluster({"a": [3.0], "b": [0.6]})) == []
    assert proposed(cluster({"a": [0.1] * 3, "b": [0.1] * 3})) == []


def test_a_rescue_needs_room_rest_and_a_worker_that_reports_slack() -> None:
    urgent = {"a": [0.5, 0.6, 0.7], "b": []}
    assert len(proposed(cluster(urgent))) >= 1
    full = cluster(urgent)
    full.put_worker(replace(full.workers["b"], capacity=0))
    assert proposed(full) == []
    rests = cluster(urgent)
    for n in range(3):
        rests.put_session(replace(rests.sessions[f"a-{n}"], rests_until=5.0))
    assert proposed(rests, now=4.0) == []
    assert proposed(rests, now=5.0)
    older = cluster({"a": [0.23, 0.3], "b": [3.0, 3.0]}, {n: 0.24 * n for n in range(1, 9)})
    assert len(proposed(older)) == 1
    for n in range(2):
        older.put_slack(f"b-{n}", None)
    assert proposed(older) == []


def test_the_room_for_an_urgent_session_counts_with_the_width_of_the_tiers_that_is_set() -> None:
    # At 0.5 s a chunk, an urgent session has 1.0 s of slack with α = 2, and 0.1 s with α = 0.2: then its next
    # chunk is late wherever it goes.
    there, late = cluster({"a": [3.0], "b": []}), {}
    for alpha in (2.0, 0.2):
        there.urgency.refresh(there.entries, there.pool, HORIZON_S, alpha)
        [late[alpha]] = [item[0] for item in there.pool("m").relaxed.items if item[-1] == "b"]
    assert late == {2.0: 0, 0.2: 1}


def test_workers_and_schedulers_share_the_width_of_a_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SchedulerSettings().tier_alpha == WorkerSettings().tier_alpha == ALPHA
    monkeypatch.setenv("TURBOSERVE_TIER_ALPHA", "3.5")
    assert SchedulerSettings().tier_alpha == WorkerSettings().tier_alpha == 3.5
    rebalancer = core_of(SchedulerSettings()).migrations._rebalancer
    assert isinstance(rebalancer, MinMaxRebalancer)
    assert rebalancer.weights.tier_alpha == 3.5


def test_the_nearer_of_equal_targets_is_taken() -> None:
    there = cluster({"a": [0.5, 0.6], "b": [], "c": []}, hosts={"a": "n/1", "b": "m/1", "c": "n/2"})
    links = MinMaxRebalancer(Weights(rescue_horizon_s=HORIZON_S))
    for name in ("a-0", "a-1"):
        there.put_session(replace(there.sessions[name], state_bytes=10**10))
    assert links.propose(there, 0.0)[0].target == "c"


def test_a_drain_gets_the_last_slot() -> None:
    there = cluster({"a": [0.5, 0.6, 0.7], "b": [3.0], "d": [3.0]})
    there.put_worker(replace(there.workers["b"], capacity=2))
    there.put_worker(replace(there.workers["d"], ready=False, draining=True))
    there.put_worker(replace(there.workers["a"], capacity=3))
    [migration] = proposed(there)
    assert (migration.session, migration.target, migration.kind) == ("d-0", "b", MigrationKind.DRAIN)


def test_balance_makes_no_chunk_late() -> None:
    # a has one session more than b, but those of b have nothing left, and those of a can wait.
    there = cluster({"a": [3.0, 3.0, 3.0], "b": [0.5]})
    assert [one.kind for one in proposed(there, rescue_horizon_s=0.0)] == [MigrationKind.BALANCE]
    there = cluster({"a": [3.0, 3.0, 3.0], "b": [0.5]})
    for one in proposed(there, rescue_horizon_s=1.0):
        assert one.kind is not MigrationKind.BALANCE or one.numbers["bottleneck_after_s"] <= 1.0


def test_the_cluster_is_as_before_after_a_proposal() -> None:
    there = cluster({"a": [0.5, 0.6, 0.7], "b": [], "d": [0.5]}, {n: 0.3 * n for n in range(1, 9)})
    there.put_worker(replace(there.workers["d"], ready=False, draining=True))
    before = dict(there.sessions)
    first = proposed(there)
    assert {one.kind for one in first} == {MigrationKind.DRAIN, MigrationKind.RESCUE}
    assert there.sessions == before
    assert proposed(there) == first


# The core


def load(name: str, *held: HeldSession) -> LoadReported:
    return LoadReported(
        LoadReport(
            worker=name,
            model="m",
            capacity=4,
            sessions=held,
            transfer=("tcp://127.0.0.1:1",),
            chunk_latency_s=ALONE,
        )
    )


def held(name: str, epoch: int = 1, slack_s: float | None = 1.0) -> HeldSession:
    slack = None
    if slack_s is not None:
        slack = SessionSlack(slack_s=slack_s, credit_s=slack_s - 0.5, tier=tier(slack_s))
    return HeldSession(session=name, epoch=epoch, next_chunk=1, slack=slack)


def test_the_view_keeps_the_slack_that_the_owner_reports_with_its_time() -> None:
    bench = Bench(worker("a"), worker("b"), session())
    bench.feed(load("a", held("s")), after=3.0)
    cluster_ = bench.core.projection.cluster(bench.now, bench.core.listening.now)
    assert cluster_.urgency.slacks["s"] == ReportedSlack(1.0, 0.5, bench.now, Tier.URGENT, True)
    # Reports of other workers and epochs change nothing.
    bench.feed(load("b", held("s", slack_s=9.0)), after=1.0)
    bench.feed(load("a", held("s", epoch=2, slack_s=9.0)))
    bench.feed(load("a", held("unknown")))
    assert bench.core.view.sessions["s"].slack == ReportedSlack(1.0, 0.5, 3.0, Tier.URGENT, True)
    bench.feed(load("a", held("s", slack_s=None)))
    cluster_ = bench.core.projection.cluster(bench.now, bench.core.listening.now)
    assert cluster_.urgency.slacks == {}


# The baseline


def test_algorithm_one_sends_two_and_receives_one_in_a_tick_the_same_node_first() -> None:
    urgent, relaxed = [0.1, 0.3, 0.2, 0.4, 0.5], [9.0]
    hosts = {"a": "n/1", "x": "n/2", "y": "m/1", "z": "n/3"}
    there = cluster({"a": urgent, "x": relaxed, "y": relaxed, "z": relaxed}, hosts=hosts)
    algorithm = AlgorithmOne()
    first = algorithm.propose(there, 100.0)
    assert [(one.session, one.target) for one in first] == [("a-0", "x"), ("a-2", "z")]
    assert algorithm.propose(there, 102.9) == []
    # Both rest for 60 s, although nothing has happened.
    second = algorithm.propose(there, 103.0)
    assert [one.session for one in second] == ["a-1", "a-3"]


def test_algorithm_one_crosses_nodes_only_without_a_receiver_and_while_urgent_heavy() -> None:
    hosts = {"a": "n/1", "b": "n/2", "x": "m/1"}
    there = cluster({"a": [0.1, 0.2], "b": [9.0, 1.9], "x": [9.0]}, hosts=hosts)
    [one] = AlgorithmOne().propose(there, 0.0)
    assert (one.session, one.target) == ("a-0", "x")
    # With a receiver in the node, one session is left urgent there.
    there = cluster({"a": [0.1, 0.2], "b": [9.0], "x": [9.0]}, hosts=hosts)
    assert [one.target for one in AlgorithmOne().propose(there, 0.0)] == ["b"]
    # A lone urgent session is first in its queue already.
    assert AlgorithmOne().propose(cluster({"a": [0.1, 9.0], "x": [9.0]}), 0.0) == []


def test_algorithm_one_drains_first() -> None:
    there = cluster({"a": [0.1, 0.2], "x": [9.0], "d": [9.0]})
    there.put_worker(replace(there.workers["d"], ready=False, draining=True))
    kinds = [(one.session, one.kind) for one in AlgorithmOne().propose(there, 0.0)]
    assert kinds == [("d-0", MigrationKind.DRAIN)]


def test_fewest_streams_ignores_capacities() -> None:
    there = [Candidate("a", "m", 9, 2), Candidate("b", "m", 2, 1), Candidate("c", "m", 1, 1)]
    [choice] = FewestStreams().place(there, [Demand("s", "m", "place")])
    assert choice.worker == "b"
