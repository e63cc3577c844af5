"""Decisions of this process that the state store has not acknowledged, numbered."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from turboserve.autoscaler.command_tracker import ActionRecord
from turboserve.autoscaler.control.events import Decision
from turboserve.contracts.pool_history import REPORTED_DECISIONS, PoolDecision

KEPT = 512
"""Number of newest decisions that are kept while the state store does not answer."""

T = TypeVar("T", Decision, ActionRecord)


class PastDecisions:
    """Collects decisions about the pool's size and actions on its members until they are stored."""

    def __init__(self) -> None:
        self._number = 0
        self._waiting: deque[PoolDecision] = deque(maxlen=KEPT)
        self._decision: Decision | None = None
        self._action: ActionRecord | None = None

    def look(
        self, decisions: Sequence[Decision], actions: Sequence[ActionRecord], now: float, wall: float
    ) -> None:
        """Number what is new in the pool's newest decisions and actions, which are newest last.

        `now` is the core's monotonic time, `wall` the same instant in Unix seconds.
        """
        fresh = [(one.at, _scaling(one)) for one in _since(decisions, self._decision)]
        fresh += [(one.at, _acting(one)) for one in _since(actions, self._action)]
        self._decision = decisions[-1] if decisions else self._decision
        self._action = actions[-1] if actions else self._action
        for at, record in sorted(fresh, key=lambda item: item[0]):
            self._number += 1
            unix = max(wall - (now - at), 0.0)
            self._waiting.append(record.model_copy(update={"number": self._number, "at": unix}))

    @property
    def report(self) -> tuple[PoolDecision, ...]:
        """The oldest waiting decisions, as many as one report has."""
        return tuple(self._waiting)[:REPORTED_DECISIONS]

    def acknowledged(self, reported: Sequence[PoolDecision]) -> None:
        """Forget decisions that the state store has."""
        last = reported[-1].number if reported else 0
        while self._waiting and self._waiting[0].number <= last:
            self._waiting.popleft()


def _since(records: Sequence[T], last: T | None) -> list[T]:
    fresh: list[T] = []
    for record in reversed(records):
        if record is last:
            break
        fresh.append(record)
    return fresh[::-1]


def _scaling(decision: Decision) -> PoolDecision:
    return PoolDecision(
        number=0,
        at=0.0,
        kind="scaling",
        action=decision.action.value,
        target=decision.target,
        previous=decision.previous,
        advice=decision.advice,
        reason=decision.reason,
        # JSON has no infinity, and one number must not make the state store refuse every report.
        numbers={name: value for name, value in decision.numbers.items() if math.isfinite(value)},
    )


def _acting(action: ActionRecord) -> PoolDecision:
    return PoolDecision(
        number=0,
        at=0.0,
        kind="action",
        action=action.action,
        member=None if action.member is None else action.member[:64],
        worker=action.worker,
        reason=action.reason,
    )
