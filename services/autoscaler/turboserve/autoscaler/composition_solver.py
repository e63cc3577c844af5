"""Solves the problems of a pool with several offers in a thread, so that no event waits for the solver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from turboserve import logs
from turboserve.autoscaler.control.composition_goal import GoalAnswered, GoalProblem, answer_to
from turboserve.clock import Clock
from turboserve.daemon_threads import DaemonThreads

log = logs.get("autoscaler")


class CompositionSolver:
    """Solves one problem at a time: `CompositionGoal` has no second one before the first is answered."""

    def __init__(self, clock: Clock, spawn: Callable[[Coroutine[Any, Any, None], str], None]) -> None:
        self._clock, self._spawn = clock, spawn
        # A program that does not end must not keep the process from ending.
        self._threads = DaemonThreads("composition")
        self._error = ""
        """Of the last problem. A repeated one is logged once."""

    def __call__(self, problem: GoalProblem, answered: Callable[[GoalAnswered, float], None]) -> None:
        """Solve a problem. `answered` is called with the answer and its time, later and in the event loop."""
        self._spawn(self._solve(problem, answered), "composition")

    async def _solve(self, problem: GoalProblem, answered: Callable[[GoalAnswered, float], None]) -> None:
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, answer_to, problem)
        if answer.error and answer.error != self._error:
            log.warning("composition not solved", error=answer.error)
        self._error = answer.error
        answered(answer, self._clock.monotonic())
