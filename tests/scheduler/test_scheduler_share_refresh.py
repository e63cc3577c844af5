"""When shares are solved again, in the running scheduler and where they are solved at once: one rule."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import SolverError
from turboserve.bus import Bus
from turboserve.clock import SystemClock
from turboserve.scheduler.executor import Executor
from turboserve.scheduler.messages import SharesSolved, SolveShares
from turboserve.scheduler.placement import Candidate, ShareKeeper, solve_shares
from turboserve.scheduler.placement.quotas import ShareProblem, Worker
from turboserve.scheduler.placement.share_keeper import quotas_of_problems
from turboserve.scheduler.placement.share_refresh import LEAST_INTERVAL_S, OLD_S, Problems, ShareRefresh

A, B = SessionClass("m"), SessionClass("n")
CAPABILITY = Capability({A: 4, B: 4})
LIMIT_S = 60.0


def problems(of_a: int, of_b: int = 1) -> Problems:
    return (ShareProblem((Worker("w", CAPABILITY, {A: of_a, B: of_b}),), {}),)


def at(refresh: ShareRefresh, present: Problems, now: float) -> Problems | None:
    return refresh.next(lambda: present, now)


def test_an_input_that_returns_before_it_was_due_keeps_its_quotas() -> None:
    """Without a solution: the quotas are of this input. They counted as old for as long as it lasted."""

    def there(of_b: int) -> list[Candidate]:
        return [Candidate("w", "m", 64, 1 + of_b, capability=CAPABILITY, counts={A: 1, B: of_b})]

    keeper = ShareKeeper()
    keeper.update(there(1), [], 0.0)
    good = keeper.quotas(0.0)
    keeper.update(there(2), [], 0.3)
    keeper.update(there(1), [], 0.6)
    keeper.update(there(1), [], 2.0)
    assert keeper.solved == 1
    assert keeper.quotas(60.0) == good != {}


def test_a_change_while_problems_are_solved_is_one_that_their_quotas_lack() -> None:
    refresh = ShareRefresh()
    refresh.changed(0.0)
    assert at(refresh, problems(1), 0.0) == problems(1)
    refresh.changed(2.0)
    assert at(refresh, problems(2), 2.0) is None
    refresh.solved()
    assert not refresh.are_old(2.0 + OLD_S)
    assert refresh.are_old(2.1 + OLD_S)
    assert at(refresh, problems(2), 2.5) == problems(2)
    refresh.solved()
    assert not refresh.are_old(1e9)


def test_without_problems_there_is_nothing_that_can_fail_or_be_old() -> None:
    refresh = ShareRefresh()
    refresh.changed(0.0)
    assert at(refresh, problems(1), 0.0) == problems(1)
    refresh.not_solved("no optimum")
    assert refresh.failed == "no optimum"
    assert at(refresh, (), LEAST_INTERVAL_S) == ()
    assert str(refresh.failed) == "None"
    assert not refresh.are_old(1e9)
    assert at(refresh, (), 2 * LEAST_INTERVAL_S) is None


def test_a_silent_solver_counts_as_failed_until_it_answers() -> None:
    refresh = ShareRefresh()
    refresh.changed(0.0)
    assert at(refresh, problems(1), 0.0) is not None
    refresh.check_answer(OLD_S)
    assert str(refresh.failed) == "None"
    refresh.check_answer(OLD_S + 0.1)
    assert refresh.failed == "the solver has not answered for 5 s"
    refresh.solved()
    assert str(refresh.failed) == "None"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("change", "pass", "solved", "not_solved")),
        st.integers(0, 3),
        st.floats(0.0, 3.0, allow_nan=False),
    ),
    max_size=30,
)


@given(STEPS)
def test_quotas_in_use_lack_no_change_for_long_and_solutions_are_rare(
    steps: list[tuple[str, int, float]],
) -> None:
    refresh, now, present = ShareRefresh(), 0.0, problems(0)
    asked_at: list[float] = []
    under_way: Problems | None = None
    solved: Problems | None = None
    lacks_since: float | None = 0.0
    will_lack_since: float | None = None
    refresh.changed(now)
    for step, count, seconds in steps:
        now += seconds
        if step == "change":
            present = problems(count)
            refresh.changed(now)
            if present != under_way and will_lack_since is None:
                will_lack_since = now
        elif step == "solved" and under_way is not None:
            refresh.solved()
            solved, under_way, lacks_since = under_way, None, will_lack_since
        elif step == "not_solved" and under_way is not None:
            refresh.not_solved("made to fail")
            under_way = None
        if (due := at(refresh, present, now)) is not None:
            assert under_way is None
            assert due == present
            assert not asked_at or now - asked_at[-1] >= LEAST_INTERVAL_S
            asked_at.append(now)
            under_way, will_lack_since = due, None
        lacks_since = None if solved == present else now if lacks_since is None else lacks_since
        if lacks_since is not None and now - lacks_since > OLD_S:
            assert refresh.are_old(now)
    # Once the input rests, it is solved at most once more, and its quotas are used.
    for _ in range(2):
        now += LEAST_INTERVAL_S
        if under_way is not None or at(refresh, present, now) is not None:
            refresh.solved()
            under_way = None
    now += LEAST_INTERVAL_S
    assert at(refresh, present, now) is None
    assert not refresh.are_old(1e9)


def test_both_ways_to_solve_have_the_same_quotas_and_failures() -> None:
    def fails(*_: object) -> Any:
        raise SolverError("made to fail")

    there = [Candidate("w", "m", 64, 3, capability=CAPABILITY, counts={A: 2, B: 1})]
    keeper = ShareKeeper()
    keeper.update(there, [], 0.0)
    assert keeper.quotas(0.0) == quotas_of_problems(solve_shares, problems(2))
    broken = ShareKeeper(fails)
    broken.update(there, [], 0.0)
    solved = asyncio.run(
        Executor(cast(Bus, None), SystemClock(), solve=fails).run(SolveShares(1, problems(2)))
    )
    assert (broken.failed, broken.quotas(0.0)) == (getattr(solved, "error", ""), {}) == ("made to fail", {})


@pytest.mark.parametrize("raised", [SystemExit("ends"), StopIteration("ends"), CancelledError("ends")])
def test_whatever_a_policy_raises_is_a_failure_to_solve(raised: BaseException) -> None:
    """Incident: the first ended the process, and after the others shares were never solved again."""

    def fails(*_: object) -> Any:
        raise raised

    async def solved() -> object:
        async with asyncio.timeout(LIMIT_S):
            return await Executor(cast(Bus, None), SystemClock(), solve=fails).run(
                SolveShares(1, problems(1))
            )

    assert asyncio.run(solved()) == SharesSolved(1, error="ends")


def test_a_policy_that_hangs_does_not_keep_the_process_from_ending() -> None:
    """Incident: the process ended when the policy returned, so never."""
    began, released = threading.Event(), threading.Event()
    solving: list[threading.Thread] = []

    def hangs(*_: object) -> Any:
        solving.append(threading.current_thread())
        began.set()
        released.wait()
        raise SolverError("too late")

    async def leads() -> None:
        executor = Executor(cast(Bus, None), SystemClock(), solve=hangs)
        command = asyncio.create_task(executor.run(SolveShares(1, problems(1))))
        async with asyncio.timeout(LIMIT_S):
            while not began.is_set():
                await asyncio.sleep(0.01)
        # As the end of a term, or of the process.
        command.cancel()

    # What `asyncio.run` waits for, the process waits for.
    process = threading.Thread(target=lambda: asyncio.run(leads()), daemon=True)
    process.start()
    try:
        process.join(LIMIT_S)
        assert began.is_set()
        assert not process.is_alive()
        # The interpreter joins all others at its end.
        assert [thread.daemon for thread in solving] == [True]
    finally:
        released.set()
        process.join(LIMIT_S)
        for thread in solving:
            thread.join(LIMIT_S)
