"""Detect that one of the worker's threads has ended or does not advance."""

from __future__ import annotations

from turboserve.worker.service.ports import EngineRunner, Packager

STUCK_S = 120.0
"""Time after which a step counts as a hung device, seconds. No step of any model takes this long."""


class Watchdog:
    """Counts observations, not time: what stops or starves the whole process also stops observations."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._turns: int | None = None
        self._still = 0

    def stuck(self, turns: int) -> bool:
        """Whether `turns`, which increases with every round, was the same in `looks` observations in a
        row."""
        self._still = self._still + 1 if turns == self._turns else 0
        self._turns = turns
        return self._still >= self._looks

    def check(self, engine: EngineRunner, packager: Packager) -> None:
        """Observe the threads of a worker. Raises `RuntimeError` if one has ended, or the engine is stuck."""
        if not engine.alive:
            raise RuntimeError("the engine's thread has ended") from engine.failure
        if not packager.alive:
            raise RuntimeError("the packager's thread has ended")
        if self.stuck(engine.turns):
            raise RuntimeError(f"the engine is stuck in one step for {STUCK_S:g} s")
