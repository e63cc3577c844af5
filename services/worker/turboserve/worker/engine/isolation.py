"""Sessions that are computed alone, since a device may have failed of their input.

A device error does not say whose input caused it. So a session that was in a failing step begins in steps of
its own, while nothing else computes: if a device fails again, it is known of whom.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeVar

from turboserve.worker.engine.session import Session

T = TypeVar("T")


class Isolation:
    """Takes turns between those that are computed alone and all others."""

    def __init__(self) -> None:
        self._alone = False
        """Whether the last batch was one of those."""

    def choose(self, waiting: list[T], session_of: Callable[[T], Session]) -> list[T]:
        """Those of `waiting` of which the next batch may be: one that is isolated, or all that are not."""
        isolated = [each for each in waiting if session_of(each).isolated]
        if not isolated:
            return waiting
        others = [each for each in waiting if not session_of(each).isolated]
        self._alone = not (self._alone and others)
        if not self._alone:
            return others
        return [min(isolated, key=lambda each: _due(session_of(each)))]


def _due(session: Session) -> float:
    return inf if session.due_at_s is None else session.due_at_s
