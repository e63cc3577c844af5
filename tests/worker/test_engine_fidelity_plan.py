"""The plan of all next chunks of a worker: nearly optimal, and the same with and without shortcuts."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.fidelity_world import (
    CHUNK_S,
    LADDER,
    loads,
    overloaded,
    planned,
    random_load,
    wide_load,
)
from turboserve.experiments.slack.reference import exchange as reference
from turboserve.experiments.slack.reference.forecast import PlannedChunk, Server, next_chunks
from turboserve.worker.engine.fidelity_exchange import MARGIN
from turboserve.worker.engine.fidelity_forecast import LATE_S, ChunkQueue, EngineLoad, StreamLoad
from turboserve.worker.engine.fidelity_in_time import RAISE_MARGIN, LeastLossInTime
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.gather import LatencyProfile

HORIZON = 2


def lateness(chunks: Sequence[PlannedChunk], server: Server) -> list[float]:
    return [max(0.0, at - chunk.due_s) for at, chunk in zip(server.ready_s(chunks), chunks, strict=True)]


def mean_quality(chunks: Sequence[PlannedChunk], ladder: FidelityLadder) -> float:
    free = [chunk for chunk in chunks if chunk.highest < chunk.lowest]
    return sum(ladder.rungs[chunk.place].quality for chunk in free) / max(1, len(free))


def set_places(chunks: Sequence[PlannedChunk], places: Sequence[int], ladder: FidelityLadder) -> None:
    for chunk, place in zip(chunks, places, strict=True):
        chunk.place, chunk.forwards = place, ladder.rungs[place].forwards


def oracle(load: EngineLoad) -> tuple[list[float], float]:
    """Least lateness of each chunk, and the best mean quality at that lateness, by trying everything."""
    chunks = next_chunks(load, HORIZON)
    server, free = Server(load, chunks), [chunk for chunk in chunks if chunk.highest < chunk.lowest]
    set_places(free, [chunk.lowest for chunk in free], load.ladder)
    least, best = lateness(chunks, server), 0.0
    for places in itertools.product(*(range(chunk.lowest + 1) for chunk in free)):
        set_places(free, places, load.ladder)
        if all(a <= b + 1e-9 for a, b in zip(lateness(chunks, server), least, strict=True)):
            best = max(best, mean_quality(chunks, load.ladder))
    return least, best


def next_places(chunks: Sequence[PlannedChunk]) -> dict[str, int]:
    return {chunk.stream.session: chunk.place for chunk in chunks if chunk.next}


def expected(load: EngineLoad, horizon: int) -> tuple[dict[str, float], int]:
    """Lateness of each session's first chunk at the best configurations, and the number of late chunks."""
    queue = ChunkQueue(load, horizon)
    first: dict[str, float] = {}
    over = np.maximum(0.0, queue.ready_s(queue.forwards) - queue.due_s)
    for stream, context, late_s in zip(queue.stream, queue.context, over, strict=True):
        if not context:
            first.setdefault(load.streams[stream].session, float(late_s))
    return first, queue.late()


def no_caps(load: EngineLoad) -> dict[str, int]:
    return {each.session: 0 for each in load.streams}


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_a_plan_has_the_least_lateness_and_the_quality_of_the_best_plan(first: int) -> None:
    lowered = 0
    for seed in range(first, first + 100):
        load = random_load(random.Random(seed))
        least, best = oracle(load)
        chunks = planned(load, no_caps(load), horizon=HORIZON)
        assert lateness(chunks, Server(load, chunks)) == pytest.approx(least), seed
        found = mean_quality(chunks, load.ladder)
        assert found >= best - 1e-9, seed
        lowered += found < 1 and any(chunk.highest < chunk.lowest for chunk in chunks)
    assert lowered > 20


@pytest.mark.parametrize("seed", [955, 3216, 24467, 40799])
def test_a_plan_uses_time_that_one_chunk_at_a_time_leaves_unused(seed: int) -> None:
    """The best plan has one chunk higher and others lower than one without swaps, which loses up to 2.9 %."""
    load = random_load(random.Random(seed))
    least, best = oracle(load)
    chunks = planned(load, no_caps(load), horizon=HORIZON)
    assert lateness(chunks, Server(load, chunks)) == pytest.approx(least)
    assert mean_quality(chunks, load.ladder) == pytest.approx(best)


def same_plan(load: EngineLoad, margin: float, horizon: int) -> list[PlannedChunk]:
    """The product's plan, which must be the reference's."""
    caps = {each.session: each.cap for each in load.streams}
    simple = reference.planned(load, caps, margin, horizon)
    chunks = planned(load, caps, margin, horizon)
    keys = [(each.stream.session, each.due_s, each.release_s, each.place, each.lowest) for each in chunks]
    assert keys == [
        (each.stream.session, each.due_s, each.release_s, each.place, each.lowest) for each in simple
    ]
    return chunks


@settings(max_examples=300)
@given(st.integers(0, 10**9), st.sampled_from([0.0, MARGIN, RAISE_MARGIN]), st.integers(1, 5))
def test_a_plan_is_the_plan_of_the_rules_without_shortcuts(seed: int, margin: float, horizon: int) -> None:
    load = wide_load(random.Random(seed))
    same_plan(load, margin, horizon)
    for stream in load.streams[:3]:
        ours, simple = LeastLossInTime(horizon), reference.ReferenceInTime(horizon)
        assert ours.choose(stream.session, load) == simple.choose(stream.session, load)


def test_the_comparison_of_plans_covers_lowered_chunks_and_late_ones() -> None:
    found = [same_plan(wide_load(random.Random(seed)), MARGIN, 3) for seed in range(60)]
    lowered = [sum(each.place > each.highest for each in chunks) for chunks in found]
    spared = [sum(each.place < each.lowest for each in chunks) for chunks in found]
    assert sum(one > 0 and other > 0 for one, other in zip(lowered, spared, strict=True)) > 20


@given(loads)
def test_no_chunk_of_a_plan_is_later_than_at_the_floor(load: EngineLoad) -> None:
    chunks = planned(load, no_caps(load))
    floor = next_chunks(load)
    free = [chunk for chunk in floor if chunk.highest < chunk.lowest]
    set_places(free, [chunk.lowest for chunk in free], load.ladder)
    server = Server(load, chunks)
    for ours, least in zip(lateness(chunks, server), lateness(floor, server), strict=True):
        assert ours <= least + 1e-6


@given(loads)
def test_where_every_chunk_is_in_time_none_is_lowered(load: EngineLoad) -> None:
    chunks = next_chunks(load)
    if max(lateness(chunks, Server(load, chunks)), default=0.0) <= LATE_S:
        assert all(chunk.place == 0 for chunk in planned(load, no_caps(load)) if chunk.lowest > chunk.highest)


@given(st.integers(1, 12), st.floats(0.5, 3.0), st.floats(0.02, 0.2))
def test_more_sessions_never_raise_the_quality(count: int, slack_s: float, forward_s: float) -> None:
    def quality(sessions: int) -> float:
        streams = [StreamLoad(f"s{i}", slack_s + 0.05 * i, lead_s=3.0, lowest=2) for i in range(sessions)]
        load = EngineLoad(LADDER, LatencyProfile({1: forward_s}), 0.05, CHUNK_S, streams)
        return mean_quality(planned(load, no_caps(load)), LADDER)

    assert quality(count + 1) <= quality(count) + 0.01


def test_a_shared_lowering_goes_where_a_second_costs_the_least_quality() -> None:
    """The first two rungs cost little, the third much: all sessions fall to the second."""
    world = overloaded(4, 1.5, lowest=3)
    busy = replace(world, streams=[replace(each, slack_s=1.0) for each in world.streams])
    chunks = planned(busy, no_caps(busy))
    assert {chunk.place for chunk in chunks} <= {0, 1, 2}
    hopeless = replace(busy, streams=[replace(each, slack_s=0.01) for each in world.streams])
    assert {chunk.place for chunk in planned(hopeless, no_caps(hopeless))[:4]} == {3}


def test_the_forecast_counts_late_chunks_and_the_lateness_of_each_session() -> None:
    """Two sessions of one slack: the device makes a chunk in 1 s, so the second is ready after 2 s."""
    streams = [StreamLoad("a", 1.5), StreamLoad("b", 1.5), StreamLoad("rich", 9.0)]
    load = EngineLoad(LADDER, LatencyProfile({1: 0.2}), 0.0, CHUNK_S, streams)
    late_s, late = expected(load, 1)
    assert late_s == pytest.approx({"a": 0.0, "b": 0.5, "rich": 0.0})
    assert late == 1


def test_a_chunk_in_work_and_undecoded_ones_come_first() -> None:
    stream = StreamLoad("a", 1.0, undecoded=1, forwards_left=2.0, place=1, lead_s=1.0, lowest=2)
    load = EngineLoad(LADDER, LatencyProfile({1: 0.1}), 0.25, CHUNK_S, [stream])
    queue = ChunkQueue(load, 2)
    assert queue.due_s.tolist() == [1.5, 2.25, 3.0]
    assert queue.release_s.tolist() == [0.0, 1.5, 2.25]
    assert queue.forwards.tolist() == [2.0, 5.0, 5.0]
    assert queue.lowest.tolist() == [1, 2, 2]
    assert queue.fixed.tolist() == [True, False, False]
    assert queue.next.tolist() == [False, True, False]


def test_the_context_comes_before_its_chunk_and_is_no_chunk_itself() -> None:
    """A recache of 0.3 s after an encoding of 0.1 s: the chunk is later by both, also that of another."""

    def found(context_s: float, encoding_s: float) -> tuple[dict[str, float], int]:
        streams = [StreamLoad("a", 1.0, context_s=context_s), StreamLoad("b", 1.5)]
        load = EngineLoad(LADDER, LatencyProfile({1: 0.2}), 0.0, CHUNK_S, streams, encoding_s=encoding_s)
        return expected(load, 1)

    assert found(0.0, 0.0)[0] == pytest.approx({"a": 0.0, "b": 0.5})
    later = found(0.3, 0.1)
    assert later[0] == pytest.approx({"a": 0.4, "b": 0.9})
    assert (found(0.0, 0.0)[1], later[1]) == (1, 2)
    assert found(0.0, 0.1)[0] == pytest.approx({"a": 0.1, "b": 0.6})


def test_a_session_without_a_slab_is_late_by_its_return_and_does_not_hold_up_the_device() -> None:
    """A chunk takes 1 s. `b` is computed while `a` returns."""

    def found(returns_s: float) -> tuple[dict[str, float], int]:
        streams = [StreamLoad("a", 1.5, lowest=2, returns_s=returns_s), StreamLoad("b", 2.2, lowest=2)]
        load = EngineLoad(LADDER, LatencyProfile({1: 0.2}), 0.0, CHUNK_S, streams)
        return expected(load, 1)

    assert found(0.0) == ({"a": 0.0, "b": 0.0}, 0)
    assert found(0.8)[0] == pytest.approx({"a": 0.3, "b": 0.0})
    # Three forwards of 0.2 s at the lowest configuration.
    assert [found(0.8)[1], found(1.0)[1]] == [0, 1]


def test_a_switch_that_is_due_lowers_what_would_be_late_with_it() -> None:
    def place(context_s: float) -> int:
        stream = StreamLoad("a", 1.5, lowest=2, context_s=context_s)
        load = EngineLoad(LADDER, LatencyProfile({1: 0.2}), 0.0, CHUNK_S, [stream])
        return next_places(planned(load, {"a": 0}, horizon=1))["a"]

    assert [place(0.0), place(0.4), place(0.6)] == [0, 0, 1]


def test_a_plan_ends_with_the_video() -> None:
    def chunks(left: int | None, forwards_left: float = 0.0) -> int:
        stream = StreamLoad("a", 1.0, forwards_left=forwards_left, chunks_left=left)
        load = EngineLoad(LADDER, LatencyProfile({1: 0.1}), 0.0, CHUNK_S, [stream])
        return len(ChunkQueue(load, 3))

    assert [chunks(None), chunks(9), chunks(2), chunks(0), chunks(0, 2.0)] == [3, 3, 2, 0, 1]


def test_a_worker_without_sessions_has_no_late_chunk() -> None:
    load = EngineLoad(LADDER, LatencyProfile({1: 0.1}), 0.0, CHUNK_S, [])
    assert ChunkQueue(load).late() == 0
    assert planned(load, {}) == []
