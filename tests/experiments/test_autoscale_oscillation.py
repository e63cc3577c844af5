"""The definition of a scaling action that was undone."""

from __future__ import annotations

import pytest

from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.experiments.autoscale.oscillation import undone
from turboserve.experiments.autoscale.outcome import ScalingOutcome

POLICY = ControlPolicy(most=9, out_cooldown_s=2.0, in_cooldown_s=10.0)


@pytest.mark.parametrize(
    ("actions", "count"),
    [
        ([(0.0, 2, 5), (9.0, 5, 3)], 1),
        ([(0.0, 2, 5), (10.0, 5, 3)], 0),
        ([(0.0, 5, 3), (1.0, 3, 6)], 1),
        ([(0.0, 5, 3), (2.0, 3, 6)], 0),
        ([(0.0, 2, 5), (1.0, 5, 6), (2.0, 6, 4), (3.0, 4, 5)], 2),
    ],
)
def test_an_action_is_undone_by_its_opposite_within_that_ones_cooldown(
    actions: list[tuple[float, int, int]], count: int
) -> None:
    assert undone(ScalingOutcome(actions=actions), POLICY) == count
