"""Chunks at lower configurations refine L(b) where chunks at the best one are missing."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.fidelity_world import ladder_of
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung
from turboserve.worker.engine.fidelity_profile import MeasuredFidelity, forward_shares
from turboserve.worker.engine.gather import _MISSING, _WARM_UP, LatencyProfile

SECONDS = {1: 0.1, 2: 0.16, 4: 0.3}
BEST = Fidelity(4, 7)
CONFIGURATIONS = {BEST: 1.0, Fidelity(4, 7, 0.5): 0.8, Fidelity(2, 7): 1.0, Fidelity(2, 2): 0.5}
"""Share of a forward's time of each."""
Sample = tuple[Literal["best", "lowered"], int, float]
shares = st.floats(0.2, 1.0)
samples = st.lists(
    st.tuples(st.sampled_from(["best", "lowered"]), st.sampled_from([1, 2, 3, 4]), shares), max_size=80
)


def steady(profile: LatencyProfile, made: list[Sample], error: float = 1.0) -> None:
    """Observe batches of a device that takes `SECONDS`, lowered ones by ratios that are wrong by `error`."""
    device = LatencyProfile(SECONDS)
    for kind, size, share in made:
        if kind == "best":
            profile.observe(size, device(size))
        else:
            profile.observe_lowered(size, error * share * device(size), share)


@given(st.floats(0.2, 6.0), st.lists(shares, min_size=1, max_size=30))
def test_a_slower_device_is_reported_after_as_many_chunks_as_at_the_best(
    slower: float, made: list[float]
) -> None:
    at_best, lowered = LatencyProfile(SECONDS), LatencyProfile(SECONDS)
    for _ in range(_WARM_UP):
        at_best.observe(1, SECONDS[1])
    for _ in range(_MISSING):
        lowered.observe_lowered(1, 0.6 * SECONDS[1], 0.6)
    for share in made:
        at_best.observe(1, slower * SECONDS[1])
        lowered.observe_lowered(1, slower * share * SECONDS[1], share)
        assert lowered(1) == pytest.approx(at_best(1))


@given(samples)
def test_exact_ratios_change_nothing_on_a_steady_device(made: list[Sample]) -> None:
    profile = LatencyProfile(SECONDS)
    steady(profile, made)
    device = LatencyProfile(SECONDS)
    assert [profile(size) for size in range(1, 6)] == pytest.approx([device(size) for size in range(1, 6)])


@given(samples, st.floats(0.4, 2.5))
def test_a_wrong_ratio_has_a_bounded_effect_which_chunks_at_the_best_end(
    made: list[Sample], error: float
) -> None:
    profile = LatencyProfile(SECONDS)
    steady(profile, made, error)
    low, high = min(1.0, error), max(1.0, error)
    device = LatencyProfile(SECONDS)
    for size in range(1, 5):
        assert low * device(size) * (1 - 1e-9) <= profile(size) <= high * device(size) * (1 + 1e-9)
        before = abs(profile(size) - device(size))
        steady(profile, [("best", size, 1.0)] * (_WARM_UP + 20), error)
        assert abs(profile(size) - device(size)) <= before * 0.9**20 + 1e-9


@given(st.floats(0.2, 6.0), shares, st.integers(0, _MISSING))
def test_where_chunks_at_the_best_come_others_change_nothing(
    error: float, share: float, between: int
) -> None:
    profile = LatencyProfile(SECONDS)
    lowered: Sample = ("lowered", 1, share)
    steady(profile, [*[lowered] * between, ("best", 1, 1.0)] * 5, error)
    assert profile(1) == pytest.approx(SECONDS[1])


def test_a_size_that_only_lowered_chunks_have_is_measured_by_them() -> None:
    profile = LatencyProfile()
    for count in range(_MISSING + 1):
        assert profile.to_mapping() == ({} if count <= _MISSING else {2: 0.2})
        profile.observe_lowered(2, 0.1, 0.5)
    assert profile.to_mapping() == {2: pytest.approx(0.2)}


@given(
    st.lists(st.sampled_from([None, *CONFIGURATIONS]), min_size=1, max_size=6),
    st.floats(0.1, 1.0),
    st.floats(0.0, 1.0),
    st.booleans(),
    st.booleans(),
)
def test_a_chunks_share_is_that_of_its_forwards_and_its_decoding(
    batch: list[Fidelity | None], forward_s: float, decode_s: float, cleans: bool, decodes: bool
) -> None:
    chunk_s = 5 * forward_s + decode_s
    rungs = [
        Rung(each, 5 * ((each.steps + 1) * share * forward_s + decode_s) / chunk_s, quality, share)
        for quality, (each, share) in zip((1.0, 0.95, 0.9, 0.8), CONFIGURATIONS.items(), strict=True)
    ]
    ladder = FidelityLadder(tuple(rungs), forward=forward_s / chunk_s)
    mean = sum(1.0 if each is None else CONFIGURATIONS[each] for each in batch) / len(batch)
    steps = 4 if batch[0] is None else batch[0].steps
    rest_s = decodes * decode_s
    expected = ((steps + cleans) * mean * forward_s + rest_s) / ((4 + cleans) * forward_s + rest_s)
    assert ladder.chunk_share(batch[0], batch[1:], cleans=cleans, decodes=decodes) == pytest.approx(expected)


def test_what_was_not_measured_has_no_share() -> None:
    ladder, off = ladder_of([(2.0, 0.9)]), Fidelity(3, 3)
    lower = ladder.rungs[1].fidelity
    assert ladder.chunk_share(lower, []) is None
    assert ladder.chunk_share(None, [lower]) is None
    assert ladder.chunk_share(off, []) is None
    assert ladder.forward_share(off) is None
    at_once = FidelityLadder((Rung(BEST, 1.0, 1.0), Rung(Fidelity(2, 7), 0.6, 0.9)))
    assert at_once.chunk_share(Fidelity(2, 7), []) is None
    # Fewer steps alone do not change a forward.
    assert ladder.forward_share(Fidelity(1, 7)) == 1.0


@given(
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.dictionaries(st.sampled_from([1, 2, 7]), st.floats(0.1, 1.2)),
)
def test_whole_chunks_tell_the_time_of_a_forward(
    forward_s: float, decode_s: float, found: dict[int, float]
) -> None:
    """Decoding is in both of two measured chunks, and falls out of the difference."""
    windows = {**found, 7: 1.0}
    measured = [
        MeasuredFidelity(Fidelity(steps, window), (steps + 1) * forward_s * share + decode_s, 0.9, (0.9, 0.9))
        for steps in (4, 3, 1)
        for window, share in windows.items()
    ]
    assert forward_shares(measured, BEST) == {
        each.fidelity: pytest.approx(windows[each.fidelity.window_chunks], abs=1e-6) for each in measured
    }
    # Without two configurations that differ in steps alone, nothing is known.
    assert forward_shares([each for each in measured if each.fidelity.steps == 4], BEST) == {}
