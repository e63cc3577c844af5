"""SlackServe's workloads: lengths, rates, bursts and pauses."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from turboserve.experiments.slack.workloads import FRAMES, WORKLOADS, chunks_of


def test_lengths_are_the_papers() -> None:
    assert [chunks_of(frames) for frames in FRAMES] == [7, 11, 14, 21]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_depends_on_its_seed_alone(name: str) -> None:
    first, again, other = (WORKLOADS[name](seed, 60, 1.0, 16) for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == 60
    assert first == sorted(first, key=lambda plan: plan.arrives_s)
    assert {plan.chunks for plan in first} == {7, 11, 14, 21}


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("workers", [16, 64])
def test_the_rate_grows_with_the_workers(name: str, workers: int) -> None:
    rates = []
    for seed in range(20):
        plans = WORKLOADS[name](seed, 300, 0.8, workers)
        rates.append((len(plans) - 1) / (plans[-1].arrives_s - plans[0].arrives_s))
    # The real arrivals are burstier than Poisson's, and a burst shortens the whole.
    assert statistics.fmean(rates) == pytest.approx(0.8 * workers / 16, rel=0.5)


def test_three_bursts_hold_a_tenth_of_the_streams_each() -> None:
    plans = WORKLOADS["burst"](1, 200, 1.0, 16)
    gaps = [after.arrives_s - before.arrives_s for before, after in pairwise(plans)]
    assert sum(gap == 0.0 for gap in gaps) == 3 * 19
    for place in (40, 100, 160):
        assert len({plan.arrives_s for plan in plans[place : place + 20]}) == 1


def test_pauses_take_a_fifth_of_the_stream_each() -> None:
    plans = WORKLOADS["pause"](1, 100, 1.0, 16)
    assert plans
    for plan in plans:
        frames = {7: 81, 11: 129, 14: 161, 21: 241}[plan.chunks]
        assert len(plan.pauses) == {81: 1, 129: 2, 161: 2, 241: 3}[frames]
        for pause in plan.pauses:
            assert pause.lasts_s == pytest.approx(frames / 16 / 5)
            assert 0.0 <= pause.at_s <= frames / 16


def test_switches_are_as_many_as_the_length_demands() -> None:
    plans = WORKLOADS["switch"](1, 100, 1.0, 16)
    assert plans
    for plan in plans:
        frames = {7: 81, 11: 129, 14: 161, 21: 241}[plan.chunks]
        assert len(plan.switches) == {81: 1, 129: 2, 161: 2, 241: 3}[frames]
        assert all(0.0 <= place <= frames / 16 for place in plan.switches)
        assert list(plan.switches) == sorted(plan.switches)
