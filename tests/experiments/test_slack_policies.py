"""Declared devices, rows and decision times of `turboserve bench slack`."""

from __future__ import annotations

import pytest

from turboserve.experiments.slack import decisions
from turboserve.experiments.slack.policies import ABLATIONS, MAIN, POLICIES, QUICK, SIDE, SWEEP
from turboserve.experiments.slack.profiles import PROFILES

pytestmark = pytest.mark.measures


def test_the_rows_are_those_of_the_comparison() -> None:
    assert set(MAIN) | set(ABLATIONS) | set(SWEEP) == set(POLICIES)
    assert set(SIDE) < set(QUICK) < set(MAIN)
    assert [name for name, policy in POLICIES.items() if policy.not_built] == []
    widths = [POLICIES[name].worker.get("tier_alpha", 2.0) for name in SWEEP]
    assert widths == [1.0, 1.5, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_declares_its_chunk(name: str) -> None:
    profile = PROFILES[name]()
    assert profile.device.chunk_s()[1] == pytest.approx(profile.chunk_s)
    assert profile.start_buffer_s == pytest.approx(4 * profile.chunk_s)
    ladder = profile.device.ladder
    assert ladder is not None
    assert (ladder.best.forwards, ladder.best.quality) == (5, 1.0)
    assert all(rung.forwards == rung.fidelity.steps + 1 for rung in ladder.rungs)


def test_the_graded_profile_has_two_steps_as_its_floor() -> None:
    ladder = PROFILES["graded"]().device.ladder
    assert ladder is not None
    assert [rung.fidelity.steps for rung in ladder.rungs] == [4, 3, 2, 1]
    assert ladder.rungs[ladder.lowest(None, False)].fidelity.steps == 2


@pytest.mark.parametrize("name", decisions.POLICIES)
def test_decision_times_are_of_one_worker_and_of_many(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "STREAMS", (16, 32))
    found = decisions.decision_times(PROFILES["graded"](), name, 2, 0)
    assert list(found) == ["16", "32"]
    for count, times in found.items():
        assert all(0 < each["p50_ms"] <= each["p99_ms"] for each in times.values())
        samples = [each["samples"] for each in times.values()]
        assert samples == [2 * decisions.DECISIONS_PER_STATE, 2 * int(count), 2]
