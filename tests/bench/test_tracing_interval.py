"""The interval of a median in `bench tracing`."""

from __future__ import annotations

from random import Random

from turboserve.bench.tracing.command import median_interval


def test_the_interval_of_a_hundred_values_is_the_one_of_the_tables() -> None:
    assert median_interval([float(value) for value in range(1, 101)]) == (40.0, 61.0)


def test_the_interval_holds_the_median_in_nineteen_of_twenty_samples() -> None:
    chance = Random(1)
    samples = (sorted(chance.expovariate(0.6931471805599453) for _ in range(60)) for _ in range(2_000))
    held = sum(low <= 1.0 <= high for low, high in map(median_interval, samples))
    assert 0.93 <= held / 2_000 <= 0.98
