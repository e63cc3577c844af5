"""Compute sessions alone whose input may have made a device fail.

A device error does not say whose input caused it. A session that was in a failing step therefore begins with
steps of its own, while nothing else computes: if a device fails again, that session is the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TypeVar

from turboserve.worker.engine.session import Session

T = TypeVar("T")


class Isolation:
    """Alternates between isolated sessions and all others."""

    def __init__(self) -> None:
        self._alone = False
        """Whether the last batch was an isolated session."""

    def choose(self, waiting: list[T], session_of: Callable[[T], Session]) -> list[T]:
        """The candidates of the next batch: one isolated item of `waiting`, or all that are not isolated."""
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
