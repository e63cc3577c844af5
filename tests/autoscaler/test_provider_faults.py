"""A provider that fails, lies or never answers: the pool does not change, and its status says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.autoscaler.autoscaler_bench import Bench, row
from tests.helpers.waiting import eventually
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.executor import Executor
from turboserve.autoscaler.lifecycle import Policy
from turboserve.autoscaler.messages import (
    DeclareGone,
    Drain,
    Exited,
    Failed,
    ListProviderWorkers,
    ListWorkers,
    ProviderWorkersListed,
    RunningWorker,
    SizeWanted,
    Tick,
)
from turboserve.autoscaler.providers.base import Health, ProviderWorker
from turboserve.autoscaler.providers.external import ExternalProvider
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.shell import Shell
from turboserve.autoscaler.status import pool_status
from turboserve.bus import Bus
from turboserve.clock import SystemClock
from turboserve.contracts.pool import PoolMemberPhase, PoolStatus
from turboserve.service import Runtime
from turboserve.tasks import stop


class Faulty(ExternalProvider):
    """Returns the given value from `adopt` and `health`, or raises it."""

    managed = True

    def __init__(self, answer: object, health: object = Health(True)) -> None:
        self._answer, self._health = answer, health

    async def adopt(self) -> list[ProviderWorker]:
        return cast(list[ProviderWorker], _given(self._answer))

    async def health(self) -> Health:
        return cast(Health, _given(self._health))


def _given(answer: object) -> object:
    if isinstance(answer, Exception):
        raise answer
    return answer


def said(bench: Bench) -> PoolStatus:
    return pool_status(bench.pool, "test", True, bench.now, 1e9)


def list_again(bench: Bench, *provider_workers: RunningWorker, after: float = 2.0) -> None:
    """List the workers again, with this answer of the provider."""
    bench.feed(Tick(), after=after)
    bench.list_members(*provider_workers)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ValueError("no such thing"), "no such thing"),
        (OSError("connection refused"), "connection refused"),
        (None, "NoneType"),
        (["wrk_a"], "AttributeError"),
        ([ProviderWorker("local-0", "wrk a\n")], "an invalid worker"),
        ([ProviderWorker("local-0", "wrk_a"), ProviderWorker("", "wrk_b")], "an invalid member"),
        ([ProviderWorker("x" * 65, "wrk_a")], "an invalid member"),
    ],
)
async def test_a_list_that_is_none_is_no_list(answer: object, why: str) -> None:
    executor = Executor(cast(Bus, SimpleNamespace(call=None)), Faulty(answer), 1.0)
    event = await executor.run(ListProviderWorkers(7))
    assert isinstance(event, Failed)
    assert event.ticket == 7
    assert why in event.reason


def test_a_provider_that_does_not_say_what_lives_changes_nothing_and_is_said() -> None:
    bench = Bench()
    worker = bench.start()
    bench.feed(Tick(), after=2.0)
    bench.feed(Failed(bench.take(ListProviderWorkers).ticket, "the cluster is away"))
    assert bench.phase is PoolMemberPhase.READY
    assert bench.pool.doubt == "no list of workers: the cluster is away"
    list_again(bench, RunningWorker("local-0", worker))
    assert bench.pool.doubt is None


def test_a_list_without_a_worker_that_speaks_is_not_believed() -> None:
    """A wrong list would end the worker's sessions everywhere else."""
    bench = Bench(policy=Policy(report_timeout_s=5.0))
    worker = bench.start()
    for _ in range(10):
        bench.report(worker)
        list_again(bench)
    assert bench.phase is PoolMemberPhase.READY
    doubt = bench.pool.doubt
    assert doubt is not None
    assert worker in doubt
    assert [action.action for action in bench.pool.actions].count("gone") == 0
    list_again(bench, RunningWorker("local-0", worker))
    assert bench.pool.doubt is None
    # After enough silence, the list is believed.
    list_again(bench, after=6.0)
    assert [action.action for action in bench.pool.actions].count("gone") == 1


def test_nor_is_one_without_a_worker_that_was_there_before_this_service_and_speaks() -> None:
    bench = Bench(size=0, policy=Policy(report_timeout_s=5.0))
    bench.list_members()
    bench.list_workers(row("wrk_old"))
    for _ in range(10):
        bench.report("wrk_old")
        list_again(bench)
    assert not bench.has(DeclareGone)
    assert "wrk_old" in (bench.pool.doubt or "")
    list_again(bench, after=6.0)
    assert bench.take(DeclareGone).worker == "wrk_old"
    assert bench.pool.doubt is None


def test_how_long_a_word_counts_follows_the_heartbeat() -> None:
    assert AutoscalerSettings(heartbeat_s=1.0).policy().report_timeout_s == 5.0
    assert AutoscalerSettings(heartbeat_s=4.0).policy().report_timeout_s == 12.0


def test_an_exit_is_believed_at_once_however_lately_it_spoke() -> None:
    bench = Bench()
    worker = bench.start()
    bench.report(worker)
    bench.feed(Exited(worker, "the process was ended by SIGKILL"))
    assert [action.action for action in bench.pool.actions].count("gone") == 1


def test_a_worker_listed_twice_and_one_without_a_member_are_accepted() -> None:
    bench = Bench()
    worker = bench.start()
    strange = RunningWorker("elsewhere", "wrk_x")
    list_again(bench, RunningWorker("local-0", worker), RunningWorker("local-7", worker), strange, strange)
    assert bench.pool.members["local-0"].worker == worker
    assert "local-7" not in bench.pool.members
    # It may hold sessions, so it is drained like any other worker.
    [extra] = [member for member in bench.pool.members.values() if member.worker == "wrk_x"]
    assert not extra.wanted


def test_a_drain_that_is_never_accepted_is_reported_when_its_deadline_passes() -> None:
    bench = Bench(size=2, policy=Policy(drain_deadline_s=10.0))
    bench.list_members()
    for _ in range(2):
        bench.launch()
    bench.feed(SizeWanted(1, "test"))
    for _ in range(24):
        if bench.has(Drain):
            bench.feed(Failed(bench.take(Drain).ticket, "the database is away"))
        bench.feed(Tick(), after=1.0)
    [member] = [member for member in bench.pool.members.values() if not member.wanted]
    assert member.phase is PoolMemberPhase.DRAINING
    extended = [action for action in bench.pool.actions if action.action == "extend"]
    assert len(extended) == 2
    assert "not accepted yet" in extended[0].reason
    assert "the database is away" in extended[0].reason


def test_a_store_that_does_not_list_its_workers_is_said() -> None:
    bench = Bench()
    worker = bench.start()
    assert said(bench).reason is None
    bench.feed(Tick(), after=2.0)
    bench.feed(Failed(bench.take(ListWorkers).ticket, "the database is away"))
    assert bench.phase is PoolMemberPhase.READY
    assert "the database is away" in (said(bench).reason or "")
    bench.list_workers(row(worker))
    assert said(bench).reason is None


class _Bus:
    """Keeps what is published. No other call is made before the provider has answered."""

    def __init__(self) -> None:
        self.published: list[PoolStatus] = []

    async def publish(self, _topic: object, _token: str, status: PoolStatus) -> None:
        self.published.append(status)


class _Runtime:
    def __init__(self) -> None:
        self.bus, self.clock = _Bus(), SystemClock()
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, work: Any, _name: str) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def until(self, condition: Callable[[PoolStatus], bool]) -> PoolStatus:
        def is_there() -> bool:
            for task in self.tasks:
                assert not task.done(), f"it ended: {task!r}"
            return bool(self.bus.published) and condition(self.bus.published[-1])

        await eventually(is_there)
        return self.bus.published[-1]


@pytest.mark.parametrize("fault", [ValueError("out of its mind"), RuntimeError("a bug"), TypeError("None")])
async def test_a_provider_that_raises_anything_at_start_is_asked_again_and_said(fault: Exception) -> None:
    runtime = _Runtime()
    settings = AutoscalerSettings(pool_size=2)
    pool = Pool("local", lambda: "wrk_a")
    shell = Shell(cast(Runtime, runtime), pool, Faulty(fault), settings)
    await shell.start()
    status = await runtime.until(lambda status: status.provider_error is not None)
    assert str(fault) in (status.provider_error or "")
    assert not pool.adopted
    await stop(*runtime.tasks)


async def test_a_health_question_that_raises_anything_is_said() -> None:
    runtime = _Runtime()
    shell = Shell(
        cast(Runtime, runtime),
        Pool("local", lambda: "w"),
        Faulty([], KeyError("nodes")),
        AutoscalerSettings(),
    )
    asking = asyncio.create_task(shell._watch_provider())
    await eventually(lambda: shell.status().provider_error is not None, 60.0)
    assert not asking.done()
    assert "nodes" in (shell.status().provider_error or "")
    await stop(asking)


def test_a_list_older_than_a_launch_says_nothing_of_it() -> None:
    bench = Bench()
    bench.list_members()
    bench.feed(Tick(), after=2.0)
    asked = bench.take(ListProviderWorkers)
    bench.launch()
    bench.feed(ProviderWorkersListed(asked.ticket, ()))
    assert bench.phase is PoolMemberPhase.READY
