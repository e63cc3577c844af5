"""The intervals of `bench tracing`."""

from __future__ import annotations

from random import Random

import pytest

from turboserve.bench.tracing import command
from turboserve.bench.tracing.command import mean_interval, median_interval


def test_the_interval_of_a_hundred_values_is_the_one_of_the_tables() -> None:
    assert median_interval([float(value) for value in range(1, 101)]) == (40.0, 61.0)


def test_the_interval_holds_the_median_in_nineteen_of_twenty_samples() -> None:
    chance = Random(1)
    samples = (sorted(chance.expovariate(0.6931471805599453) for _ in range(60)) for _ in range(2_000))
    held = sum(low <= 1.0 <= high for low, high in map(median_interval, samples))
    assert 0.93 <= held / 2_000 <= 0.98


def test_the_interval_holds_the_sum_of_two_means_in_nineteen_of_twenty_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "RESAMPLES", 200)
    chance = Random(1)
    held = 0
    for _ in range(100):
        rounds = [chance.expovariate(1.0) for _ in range(80)]
        exports = [chance.gauss(2.0, 0.5) for _ in range(12)]
        low, high = mean_interval(rounds, exports)
        held += low <= 3.0 <= high
    assert 88 <= held <= 99
    assert mean_interval([1.0] * 9, ()) == (1.0, 1.0)
