"""Placement of several classes on unlike workers. One class is placed as by min-max."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.drawn_clusters import MODELS, SESSIONS, session_states, worker_states
from tests.scheduler.drawn_mixes import CLASSES, capabilities
from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import SolverError
from turboserve.scheduler.placement import (
    SHARES,
    Candidate,
    Cluster,
    Demand,
    MinMax,
    MixedMinMax,
    SessionState,
    ShareKeeper,
    WorkerState,
)

A, B, C = CLASSES[:3]


def candidate(name: str, capability: Capability, counts: dict[SessionClass, int] | None = None) -> Candidate:
    held = Counter(counts or {})
    return Candidate(name, "m", 64, held.total(), capability=capability, counts=held)


def demand(name: str, one: SessionClass) -> Demand:
    return Demand(name, one.model, "place", session_class=one)


# Capability


def test_a_class_names_the_field_that_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"floor: 1\.5 is not between 0 and 1"):
        SessionClass("m", floor=1.5)
    with pytest.raises(ValueError, match="model"):
        SessionClass("")
    with pytest.raises(ValueError, match="sessions: -1 sessions of m"):
        Capability({SessionClass("m"): -1})


@given(st.integers(1, 12), st.integers(0, 15))
def test_one_class_fits_as_its_number_says(most: int, count: int) -> None:
    capability = Capability({A: most})
    assert capability.fits({A: count}) == (count <= most)
    assert capability.utilization({A: count}) == count / most


@given(capabilities(), st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 4)))
def test_most_is_the_largest_number_that_fits(
    capability: Capability, counts: dict[SessionClass, int]
) -> None:
    for one in CLASSES:
        more = capability.most(one, counts)
        if not capability.fits(counts):
            assert more == 0
            continue
        after = Counter(counts)
        after[one] += more
        assert capability.fits(after)
        after[one] += 1
        assert not capability.fits(after)


# One class: the decisions of min-max


def arrivals(number: int) -> list[tuple[str, str]]:
    """Draw a stream of sessions that come and go."""
    chance, present, events = random.Random(f"stream {number}"), list[str](), list[tuple[str, str]]()
    for index in range(80):
        if present and chance.random() < 0.4:
            events.append(("end", present.pop(chance.randrange(len(present)))))
        else:
            present.append(f"s{index:02}")
            events.append(("place", present[-1]))
    return events


@pytest.mark.parametrize("number", range(30))
@pytest.mark.parametrize("declared", [False, True])
def test_one_class_is_placed_as_by_min_max_event_by_event(number: int, declared: bool) -> None:
    """Two pools see the same events. One has declared capabilities and shares that are kept up to date."""
    chance = random.Random(f"pool {number}")
    plain, mixed = MinMax(), MixedMinMax()
    clusters = Cluster(), Cluster()
    for index in range(chance.randint(1, 6)):
        each_s, capacity = chance.choice((0.05, 0.1, 0.2)), chance.randint(1, 6)
        latency_s = {n: 0.02 + each_s * n for n in range(1, capacity + 1)}
        worker = WorkerState(f"w{index}", "m", capacity, chunk_latency_s=latency_s)
        clusters[0].put_worker(worker)
        if declared:
            one = SessionClass("m")
            capability = Capability({one: capacity}, {one: 10**9}, capacity * 10**9)
            worker = replace(worker, capability=capability, class_latency_s={one: latency_s})
        clusters[1].put_worker(worker)
    for time, (event, name) in enumerate(arrivals(number)):
        if event == "end":
            for cluster in clusters:
                cluster.drop_session(name)
            continue
        wanted = [Demand(name, "m", "place")]
        mixed.observe(clusters[1].candidates(), wanted, float(time))
        [first], [second] = (p.assign(c, wanted) for p, c in zip((plain, mixed), clusters, strict=True))
        assert first == second
        if first.worker is not None:
            for cluster in clusters:
                cluster.put_session(SessionState(name, "m", first.worker))


@settings(max_examples=15 if settings().derandomize else 60)
@given(st.data())
def test_a_cluster_without_capabilities_is_placed_as_by_min_max(data: st.DataObject) -> None:
    workers = [data.draw(worker_states(name)) for name in ("w0", "w1", "w2", "w4")]
    sessions = [data.draw(session_states(name)) for name in SESSIONS[:12]]
    cluster = Cluster(workers, sessions)
    wanted = [Demand(f"n{n}", data.draw(st.sampled_from(MODELS)), "place") for n in range(4)]
    mixed = MixedMinMax()
    mixed.observe(cluster.candidates(), wanted, 0.0)
    assert mixed.assign(cluster, wanted) == MinMax().assign(cluster, wanted)
    assert mixed.place(cluster.candidates(), wanted) == MinMax().place(cluster.candidates(), wanted)


# Several classes


def test_no_worker_gets_more_than_its_polytope() -> None:
    there = [candidate("a", Capability({A: 2, B: 4})), candidate("b", Capability({B: 3}))]
    sessions = [A, B, B, B, B, B, A, B, A]
    mixed = MixedMinMax()
    demands = [demand(f"s{n}", one) for n, one in enumerate(sessions)]
    choices = mixed.place(there, demands)
    for worker in there:
        counts = Counter(o for c, o in zip(choices, sessions, strict=True) if c.worker == worker.worker)
        assert worker.capability is not None
        assert worker.capability.fits(counts)
    [last] = mixed.place([candidate("b", Capability({B: 3}))], [demand("s", A)])
    assert last.worker is None
    assert "serves" in last.reason


def test_classes_that_share_a_worker_take_turns() -> None:
    """Two half-full classes fit by the polytope, but their measured latencies exceed a chunk's time."""
    latency_s = {one: {1: 0.5, 2: 0.6, 3: 0.7, 4: 0.75} for one in (A, B)}
    worker = replace(candidate("a", Capability({A: 4, B: 4}), {A: 2}), class_latency_s=latency_s)
    [beside] = MixedMinMax().place([worker], [demand("s", B)])
    assert beside.worker is None
    [alike] = MixedMinMax().place([worker], [demand("s", A)])
    assert alike.worker == "a"
    assert alike.numbers["latency_s"] == 0.7


def test_quotas_come_before_the_bottleneck_and_are_soft() -> None:
    """Kind x serves A best, so B goes to kind y, although x would be less busy with it."""
    there = [candidate("x", Capability({A: 4, B: 6})), candidate("y", Capability({A: 3, B: 2}))]
    sessions = [B] * 6 + [A] * 3
    demands = [demand(f"s{n}", one) for n, one in enumerate(sessions)]
    with_shares, without = MixedMinMax(), MixedMinMax()
    with_shares.observe(there, demands, 0.0)
    assert all(choice.worker is not None for choice in with_shares.place(there, demands))
    assert any(choice.worker is None for choice in without.place(there, demands))
    # The quotas of these workers are used up. Further sessions go wherever there is room.
    [more] = with_shares.place([candidate("y", Capability({A: 3, B: 2}))], [demand("more", B)])
    assert more.worker == "y"
    assert "quota" not in more.reason


def test_a_worker_that_tells_no_classes_serves_its_model() -> None:
    one = SessionClass("m", 1280, 720)
    there = [
        Candidate("plain", "m", 2, 0, chunk_latency_s={1: 0.1, 2: 0.2}),
        candidate("declared", Capability({one: 1})),
    ]
    choices = MixedMinMax().place(there, [demand(f"s{n}", one) for n in range(4)])
    assert Counter(choice.worker for choice in choices) == {"plain": 2, "declared": 1, None: 1}


# The keeper of shares


def test_shares_are_solved_on_a_change_and_at_most_once_a_second() -> None:
    keeper = ShareKeeper()
    there = [candidate("a", Capability({A: 4, B: 4}), {A: 1, B: 1})]
    keeper.update(there, [], 0.0)
    keeper.update(there, [], 10.0)
    assert keeper.solved == 1
    for step in range(10):
        keeper.update([candidate("a", Capability({A: 4, B: 4}), {A: 1, B: step % 3})], [], 10.0 + step * 0.1)
    assert keeper.solved <= 2
    keeper.update([candidate("a", Capability({A: 4, B: 4}), {A: 2, B: 2})], [], 12.0)
    assert keeper.quotas(12.0) == {"a": {A: 2, B: 2}}


def test_old_shares_are_not_used() -> None:
    def fails(*given: object) -> object:
        raise SolverError("no optimum: made to fail")

    keeper = ShareKeeper()
    there = [candidate("a", Capability({A: 4, B: 4}), {A: 1, B: 1})]
    keeper.update(there, [], 0.0)
    good = keeper.quotas(0.0)
    keeper.solve = fails  # type: ignore[assignment]
    changed = [candidate("a", Capability({A: 4, B: 4}), {A: 2, B: 1})]
    keeper.update(changed, [], 2.0)
    assert "made to fail" in str(keeper.failed)
    assert keeper.quotas(6.9) == good != {}
    assert keeper.quotas(7.1) == {}
    keeper.solve = SHARES.make("exact")
    keeper.update(changed, [], 8.0)
    assert str(keeper.failed) == "None"
    assert keeper.quotas(inf) != {}
