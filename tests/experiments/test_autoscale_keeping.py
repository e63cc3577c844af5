"""A table as a whole: a burst after a calm period meets the row of the calm."""

from __future__ import annotations

from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance
from turboserve.experiments.autoscale.appendix import segment
from turboserve.experiments.autoscale.keeping import as_a_whole, keep_target, levels_at, replay
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.profiling import RHO_GRID

POLICY = ControlPolicy(most=16, capacity=5)
TRACE = segment(27, 0)
ROWS = (
    LevelParameters(level=1, volatility_from=0, volatility_to=2, latency_weight=0.2, target_utilization=0.75),
    LevelParameters(level=2, volatility_from=2, latency_weight=0.2, target_utilization=0.35),
)
TABLE = ProfileTable(levels=ROWS, provenance=Provenance(source="x"))


def test_the_row_of_the_calm_is_to_blame() -> None:
    late = replay(TRACE, Plant(), POLICY, TABLE).late_since
    assert late
    begins = min(step.at for step in TRACE.steps if step.at > 0)
    assert all(begins <= at <= begins + 3 for at in late)
    before = [at - Plant().start_up_s for at in late]
    assert levels_at(TRACE, TABLE, POLICY, before) == [1] * len(late)
    assert levels_at(TRACE, TABLE, POLICY, [-5.0, begins + 3]) == [1, 2]


def test_its_target_is_lowered_until_no_session_is_late_and_no_other_target() -> None:
    known = as_a_whole(TABLE, [TRACE], Plant(), POLICY)
    assert known.provenance.late == len(replay(TRACE, Plant(), POLICY, TABLE).late_since)
    kept = keep_target(TABLE, [TRACE], Plant(), POLICY)
    assert kept.provenance.late == 0
    assert kept.provenance.activations == 43
    # Sixteen sessions have 27 free slots beside them.
    assert kept.levels[0].target_utilization <= 16 / (16 + 27) + 0.05
    assert kept.levels[1] == TABLE.levels[1]


def test_it_ends_where_no_table_can_keep_the_target() -> None:
    kept = keep_target(TABLE, [TRACE], Plant(most=4), ControlPolicy(most=4, capacity=5))
    assert kept.provenance.late
    assert kept.levels[0].target_utilization == min(RHO_GRID)
