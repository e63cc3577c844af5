"""The choice of a chunk's configuration: by the queue of the whole worker, within each session's limits."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.fidelity_world import (
    BEST,
    CHUNK_S,
    LADDER,
    ladder_of,
    loads,
    overloaded,
    quality_of,
    serve,
)
from turboserve.baselines.fidelity import BudgetedFidelity, FixedLevels
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_forecast import EngineLoad, StreamLoad
from turboserve.worker.engine.fidelity_in_time import HOLD_S, LeastLossInTime
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung
from turboserve.worker.engine.fidelity_policy import FIDELITY_POLICIES, BestFidelity
from turboserve.worker.engine.fidelity_profile import FidelityProfile, MeasuredFidelity
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.profile_file import InvalidProfileError
from turboserve.worker.model.config import ModelConfig


@given(loads, st.sampled_from(FIDELITY_POLICIES.names), st.integers(0, 3))
def test_a_pinned_session_is_never_lowered_and_none_below_its_floor(
    load: EngineLoad, name: str, place: int
) -> None:
    """Also where its configuration is below its floor, because the floor was raised meanwhile."""
    last = len(load.ladder.rungs) - 1
    streams = [replace(each, place=min(place, last)) for each in load.streams]
    busy = replace(load, streams=streams)
    for stream in busy.streams:
        policies = [FIDELITY_POLICIES.make(name), BudgetedFidelity(), FixedLevels()]
        assert all(0 <= each.choose(stream.session, busy) <= stream.lowest for each in policies)


def test_a_chunk_that_a_viewer_waits_for_with_nothing_to_play_gets_the_lowest_configuration() -> None:
    def chosen(stream: StreamLoad) -> int:
        load = EngineLoad(LADDER, LatencyProfile({1: 0.01}), 0.0, CHUNK_S, [stream])
        return LeastLossInTime().choose("a", load)

    stream = StreamLoad("a", 3.0, lowest=2)
    assert chosen(stream) == 0
    assert chosen(replace(stream, starts=True)) == 2
    assert chosen(replace(stream, starts=True, lowest=1)) == 1
    assert chosen(replace(stream, starts=True, lowest=0)) == 0


@pytest.mark.parametrize("load", [1.1, 1.3, 1.5])
def test_an_overloaded_worker_is_in_time_with_little_loss_of_quality(load: float) -> None:
    """The bound: the work that the device does in the time, spent where it costs the least quality."""
    world = overloaded(8, load)
    best, ours, budgeted = (
        serve(policy, world, 60.0) for policy in (BestFidelity(), LeastLossInTime(), BudgetedFidelity())
    )
    assert sum(each.late for each in best) > 50
    assert sum(each.late for each in ours) == 0
    # BMPR sees no queue: it lowers a session when its own slack is nearly used up.
    assert sum(each.late for each in budgeted) > 0
    # From place 0 to 2 each forward costs 0.025 of quality; a share 1 - 1 / load of all forwards must go.
    bound = 1 - 0.025 * BEST.forwards * (1 - 1 / load)
    assert bound - 0.02 < quality_of(ours, LADDER) <= bound + 0.01


def test_no_session_flaps_where_the_load_changes_around_the_limit() -> None:
    slowdown = [(5.0 * i, 1.35 if i % 2 else 0.9) for i in range(60)]
    sessions = serve(LeastLossInTime(), overloaded(6, 1.0), 300.0, slowdown)
    most = 0
    for each in sessions:
        changes = [
            (at, after - before)
            for (_, before), (at, after) in itertools.pairwise(each.places)
            if after != before
        ]
        raises = [at for at, change in changes if change < 0]
        assert all(b - a >= HOLD_S - 1e-9 for a, b in itertools.pairwise(raises))
        for start, _ in changes:
            minute = [at for at, _ in changes if start <= at < start + 60]
            most = max(most, len(minute))
            assert len(minute) <= (60 / HOLD_S + 1) * 3
    assert most > 0
    assert sum(each.late for each in sessions) == 0


def test_quality_returns_when_the_load_has_gone() -> None:
    sessions = serve(LeastLossInTime(), overloaded(8, 1.4), 120.0, [(60.0, 0.5)])
    assert any(place for each in sessions for at, place in each.places if at < 60)
    assert all(not place for each in sessions for at, place in each.places if at > 60 + HOLD_S + 5)


@pytest.mark.parametrize("lead_s", [CHUNK_S, 2 * CHUNK_S, 4 * CHUNK_S])
@pytest.mark.parametrize("chunk_s", [0.2, 0.4, 0.55])
def test_quality_returns_with_a_short_lead(lead_s: float, chunk_s: float) -> None:
    """Incident: a chunk was to be early by its whole time to be raised. With a lead of one chunk it never is.
    So a session that was lowered once stayed so, and its quality debt kept a pool from shrinking."""
    forward = LatencyProfile({1: chunk_s / BEST.forwards})
    alone = StreamLoad("a", lead_s - 0.02, lead_s=lead_s, place=2, lowest=2)
    load = EngineLoad(LADDER, forward, 0.01, CHUNK_S, [alone])
    assert LeastLossInTime().choose("a", load) == 0
    # Not while it is still short of time: it would fall again at once.
    behind = replace(alone, slack_s=chunk_s / 2)
    assert LeastLossInTime().choose("a", replace(load, streams=[behind])) == 2


def test_a_paused_viewer_lowers_no_session_and_is_not_lowered() -> None:
    world = overloaded(8, 1.3)
    paused = [replace(each, slack_s=float("inf")) for each in world.streams[:4]]
    load = replace(world, streams=[*paused, *world.streams[4:]])
    policy = LeastLossInTime()
    assert [policy.choose(each.session, load) for each in load.streams] == [0] * 8


def test_an_unknown_latency_lowers_nothing() -> None:
    load = replace(overloaded(8, 2.0), forward=LatencyProfile())
    assert LeastLossInTime().choose("s0", load) == 0


def measured(fidelity: Fidelity, seconds: float, quality: float) -> MeasuredFidelity:
    return MeasuredFidelity(fidelity, seconds, quality, (quality, quality))


def test_a_ladder_begins_at_the_best_and_has_only_what_is_faster_and_not_dominated(
    tiny_config: ModelConfig,
) -> None:
    config = tiny_config
    best = Fidelity.best(config)
    file = FidelityProfile(
        "m",
        "cpu",
        100,
        (
            measured(best, 1.0, 0.8),
            measured(Fidelity(3, 1), 1.2, 0.9),
            measured(Fidelity(3, best.window_chunks), 0.8, 0.84),
            measured(Fidelity(2, best.window_chunks), 0.6, 0.82),
            measured(Fidelity(2, 1), 0.7, 0.4),
            measured(Fidelity(1, best.window_chunks), 0.4, 0.6),
        ),
    )
    ladder = FidelityLadder.of_profile(file, config)
    assert ladder.best == Rung(best, 5.0, 1.0)
    # Both faster ones are as good as the best: the fastest of them is enough.
    assert [rung.fidelity.steps for rung in ladder.rungs] == [4, 2, 1]
    assert [rung.forwards for rung in ladder.rungs] == pytest.approx([5.0, 3.0, 2.0])
    assert [rung.quality for rung in ladder.rungs] == pytest.approx([1.0, 1.0, 0.75])
    assert ladder.floor == 1.0
    # Three steps less save 0.6 s of the best one's second. A forward with fewer steps is a forward of it.
    assert ladder.forward == pytest.approx(0.2)
    assert [rung.forward_share for rung in ladder.rungs] == [None, 1.0, 1.0]
    lower = FidelityLadder.of_profile(file, config, floor=0.5)
    limits = [(None, False), (0.9, False), (0.2, False), (0.2, True)]
    assert [lower.lowest(*each) for each in limits] == [2, 1, 2, 0]
    assert lower.place(None) == 0
    assert lower.place(Fidelity(1, 1)) is None
    assert lower.quality(lower.rungs[2].fidelity) == pytest.approx(0.75)
    with pytest.raises(InvalidProfileError, match="must be among them"):
        FidelityLadder.of_profile(replace(file, measured=file.measured[1:]), config)
    with pytest.raises(ValueError, match="must be faster"):
        ladder_of([(4.0, 0.9), (4.0, 0.8)])


@pytest.mark.parametrize(
    ("slack_s", "budgeted", "level"), [(9.0, 0, 0), (4.5, 0, 1), (0.9, 1, 2), (0.61, 2, 2), (0.1, 2, 2)]
)
def test_the_papers_policies_see_only_their_own_session(slack_s: float, budgeted: int, level: int) -> None:
    """A chunk takes 1.0, 0.8 and 0.6 s at the three places; the floor shuts out the fourth."""
    crowd = [StreamLoad(f"s{i}", 0.0, lowest=2) for i in range(20)]
    stream = StreamLoad("a", slack_s, lowest=2)
    load = EngineLoad(LADDER, LatencyProfile({1: 0.2}), 0.0, CHUNK_S, [stream, *crowd])
    assert BudgetedFidelity().choose("a", load) == budgeted
    assert FixedLevels().choose("a", load) == level
