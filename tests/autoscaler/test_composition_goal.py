"""The goal of a pool with several offers while it is solved: late, stale and failed answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from threading import Event
from typing import Any

import pytest

from tests.autoscaler.offer_fleet import OFFERS, POLICY, TERMS
from tests.helpers.virtual_clock import VirtualClock
from turboserve.allocation.linear import SolverError
from turboserve.autoscaler import composition_solver
from turboserve.autoscaler.composition_solver import CompositionSolver
from turboserve.autoscaler.control import composition_goal
from turboserve.autoscaler.control.composition_controller import CompositionController
from turboserve.autoscaler.control.composition_goal import (
    RETRY_S,
    SILENT_S,
    GoalAnswered,
    GoalProblem,
    answer_to,
)
from turboserve.autoscaler.control.events import ControlTick, FeedbackReceived, SizeOverridden
from turboserve.autoscaler.control.policy import default_table
from turboserve.autoscaler.control.pool_offers import OffersObserved, OfferState
from turboserve.contracts.pool import LoadFeedback

HIRED = {"wide": 0, "tiny": 1, "both": 0}
NONE = dict.fromkeys(HIRED, 0)


class Pool:
    """A pool without workers, whose problems are solved when the test says so."""

    def __init__(self) -> None:
        self.controller = CompositionController(POLICY, default_table(), OFFERS, TERMS, {})
        self.now = 0.0
        self.controller.handle(OffersObserved(dict.fromkeys(HIRED, OfferState())), self.now)

    @property
    def sizes(self) -> dict[str, int]:
        return self.controller.sizes

    def report(self, light: int, after_s: float = 0.1) -> GoalProblem | None:
        """Pass a report of the scheduler. Returns the problem to solve."""
        self.now += after_s
        load = LoadFeedback(
            model="light", rho_max=0, required=light, waiting=light, capacity=0, workers=0, at=self.now
        )
        self.controller.handle(FeedbackReceived(load), self.now)
        return self.controller.problem()

    def answer(self, answer: GoalAnswered) -> None:
        self.controller.handle(answer, self.now)

    def said(self) -> str:
        return self.controller.decisions[-1].reason


def first_problem(pool: Pool) -> GoalProblem:
    problem = pool.report(light=1)
    assert problem is not None
    return problem


def test_sizes_stay_until_the_answer_comes_and_one_problem_is_solved_at_a_time() -> None:
    pool = Pool()
    problem = first_problem(pool)
    assert [pool.report(light=sessions) for sessions in (2, 1, 3)] == [None, None, None]
    assert pool.sizes == NONE
    # More sessions have come. What was found for the first ones still holds, and the next problem has them.
    pool.answer(answer_to(problem))
    assert pool.sizes == HIRED
    following = pool.report(light=3)
    assert following is not None
    assert (following.sizes, following.live["light"]) == (HIRED, 3)


def test_an_answer_for_other_orders_or_workers_is_not_used() -> None:
    pool = Pool()
    problem = first_problem(pool)
    pool.controller.handle(SizeOverridden(0, "an operator"), pool.now)
    pool.answer(answer_to(problem))
    assert pool.sizes == NONE
    ordered = pool.controller.problem()
    assert ordered is not None
    assert ordered.total == 0
    pool.controller.handle(SizeOverridden(None, "an operator"), pool.now)
    pool.controller.handle(OffersObserved({"tiny": OfferState(1, capacity={"light": 7})}), pool.now)
    pool.answer(answer_to(ordered))
    latest = pool.controller.problem()
    assert latest is not None
    assert next(iter(latest.offers["tiny"].capability.sessions.values())) == 7
    # An answer to an earlier problem comes too late.
    pool.answer(GoalAnswered(problem, None, "late"))
    pool.answer(answer_to(latest))
    assert pool.sizes == HIRED


def test_a_plan_that_was_not_found_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: a problem counted as solved before its plan was. Nothing happened until demand changed."""

    def no_plan(*_: object) -> None:
        raise SolverError("no optimum: numbers")

    pool = Pool()
    with monkeypatch.context() as patched:
        patched.setattr(composition_goal, "plan", no_plan)
        pool.answer(answer_to(first_problem(pool)))
    assert pool.sizes == NONE
    assert pool.said() == "no composition: no optimum: numbers"
    assert pool.report(light=1, after_s=RETRY_S / 2) is None
    again = pool.report(light=1, after_s=RETRY_S / 2)
    assert again is not None
    pool.answer(answer_to(again))
    assert pool.sizes == HIRED


def test_a_solver_that_is_silent_is_said_and_its_late_answer_counts() -> None:
    pool = Pool()
    problem = first_problem(pool)
    for _ in range(int(SILENT_S / 2) + 1):
        assert pool.report(light=1, after_s=2.0) is None
    assert pool.said() == "no composition: the solver has not answered for 10 s"
    pool.answer(answer_to(problem))
    assert pool.sizes == HIRED


def test_an_answer_that_comes_while_load_is_unknown_waits() -> None:
    pool = Pool()
    problem = first_problem(pool)
    pool.now += POLICY.stale_s + 1.0
    pool.answer(answer_to(problem))
    assert pool.sizes == NONE
    pool.report(light=1)
    assert pool.sizes == HIRED


async def test_no_event_waits_for_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the event loop, the solver would not see that it may end."""
    may_end, tasks = Event(), list[asyncio.Task[None]]()

    def slow(problem: GoalProblem) -> GoalAnswered:
        in_time = may_end.wait(30.0)
        return answer_to(problem) if in_time else GoalAnswered(problem, None, "it was waited for")

    def spawn(work: Coroutine[Any, Any, None], name: str) -> None:
        tasks.append(asyncio.create_task(work, name=name))

    monkeypatch.setattr(composition_solver, "answer_to", slow)
    pool, clock = Pool(), VirtualClock()
    solve: Callable[..., None] = CompositionSolver(clock, spawn)
    solve(first_problem(pool), pool.controller.handle)
    await asyncio.sleep(0)
    clock.advance(pool.now + 1.0)
    pool.controller.handle(ControlTick(), clock.monotonic())
    may_end.set()
    await tasks[0]
    assert pool.sizes == HIRED
