"""Decisions reach the state store once each, whatever answers are lost."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from turboserve.autoscaler.command_tracker import ActionRecord
from turboserve.autoscaler.control.events import Decision, ScalingAction
from turboserve.autoscaler.past_decisions import PastDecisions
from turboserve.contracts.pool_history import REPORTED_DECISIONS, PoolDecision

WALL = 1_700_000_000.0
ROUNDS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans()), max_size=20)


@given(ROUNDS)
def test_each_decision_is_stored_once_in_the_order_of_time(rounds: list[tuple[int, int, bool]]) -> None:
    past, now = PastDecisions(), 0.0
    stored: dict[int, PoolDecision] = {}
    decisions: deque[Decision] = deque(maxlen=32)
    actions: deque[ActionRecord] = deque(maxlen=32)
    made: list[str] = []
    for scaled, acted, answered in [*rounds, *[(0, 0, True)] * 20]:
        for kind in "s" * scaled + "a" * acted:
            now += 0.125
            made.append(f"{kind} {len(made)}")
            if kind == "s":
                # Decisions of equal content are different ones.
                decisions.append(Decision(now, ScalingAction.HOLD, 1, 1, 1, made[-1]))
            else:
                actions.append(ActionRecord(now, "launch", made[-1]))
        past.look(decisions, actions, now, WALL + now)
        report = past.report
        assert len(report) <= REPORTED_DECISIONS
        # The state store has it, also if its answer is lost.
        for one in report:
            assert stored.setdefault(one.number, one) == one
        if answered:
            past.acknowledged(report)
    assert past.report == ()
    assert [stored[number].reason for number in sorted(stored)] == made
    times = [stored[number].at for number in sorted(stored)]
    assert times == sorted(times)
