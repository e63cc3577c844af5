"""The virtual event loop: unmodified asyncio code, reproducible, with processes that freeze and die."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, suppress

import pytest

from turboserve.simulation.runtime.loop import DeadlockError, VirtualLoop
from turboserve.simulation.runtime.process import Process, ProcessDeadError, current


@pytest.fixture(params=[False, True], ids=["drawn", "fixed order"])
def loop(request: pytest.FixtureRequest) -> Iterator[VirtualLoop]:
    loop = VirtualLoop(seed=1)
    loop.fixed_order = request.param
    yield loop
    loop.close()


class Port:
    """A port with effects outside the process. It is closed to dead processes."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        process = current()
        if process is not None:
            process.check_alive()
        self.said.append(text)


def test_an_hour_passes_at_once(loop: VirtualLoop) -> None:
    began = time.monotonic()
    loop.advance(3_600.0)
    assert loop.time() == 3_600.0
    assert time.monotonic() - began < 60.0


def test_asyncios_own_tools_run_unmodified(loop: VirtualLoop) -> None:
    async def work() -> list[str]:
        said: list[str] = []
        queue: asyncio.Queue[int] = asyncio.Queue(1)

        async def produce() -> None:
            for number in range(3):
                await queue.put(number)
                await asyncio.sleep(1.0)

        async def consume() -> None:
            for _ in range(3):
                said.append(f"{await queue.get()} at {loop.time():g}")

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        said.append(f"timeout at {loop.time():g}")
        said.append(await asyncio.to_thread(lambda: "from a thread"))
        return said

    assert loop.run_until_complete(work()) == [
        "0 at 0", "1 at 1", "2 at 2", "timeout at 8", "from a thread",
    ]  # fmt: skip


def race(seed: int, *, fixed_order: bool = False) -> tuple[str, ...]:
    loop = VirtualLoop(seed)
    loop.fixed_order = fixed_order
    said: list[str] = []

    async def run(name: str) -> None:
        for step in range(4):
            said.append(f"{name}{step}")
            await asyncio.sleep(0)

    for name in "abc":
        loop.spawn(Process(name), run(name))
    loop.advance(1.0)
    loop.close()
    return tuple(said)


def test_a_seed_gives_one_order_and_other_seeds_give_others() -> None:
    assert race(7) == race(7)
    assert len({race(seed) for seed in range(20)}) > 10


def test_a_fixed_order_is_the_same_with_each_seed_and_runs_one_process_after_the_other() -> None:
    steps = tuple(f"{name}{step}" for name in "abc" for step in range(4))
    assert {race(seed, fixed_order=True) for seed in range(20)} == {steps}


def test_in_a_fixed_order_a_process_that_gets_a_callback_again_waits_for_the_others() -> None:
    loop = VirtualLoop(seed=1)
    loop.fixed_order = True
    said: list[str] = []
    first, second = Process("first"), Process("second")

    async def ask() -> None:
        said.append("asks")
        await answer
        said.append("has the answer")

    async def respond() -> None:
        said.append("answers")
        answer.set_result(None)
        await asyncio.sleep(0)
        said.append("goes on")

    answer: asyncio.Future[None] = loop.create_future()
    loop.spawn(first, ask())
    loop.spawn(second, respond())
    loop.advance(1.0)
    loop.close()
    assert said == ["asks", "answers", "goes on", "has the answer"]


def test_callbacks_of_one_process_run_in_the_order_of_their_scheduling() -> None:
    for seed in range(20):
        for name in "abc":
            steps = [step for step in race(seed) if step.startswith(name)]
            assert steps == sorted(steps)


def test_a_frozen_process_runs_nothing_and_goes_on_late(loop: VirtualLoop) -> None:
    said: list[tuple[str, float]] = []

    async def tick(name: str) -> None:
        while True:
            await asyncio.sleep(1.0)
            said.append((name, loop.time()))

    frozen, other = Process("frozen"), Process("other")
    loop.spawn(frozen, tick("frozen"))
    loop.spawn(other, tick("other"))
    loop.advance(1.5)
    loop.freeze(frozen, 3.0)
    loop.advance(4.25)
    assert [at for name, at in said if name == "frozen"] == [1.0, 4.5, 5.5]
    assert [at for name, at in said if name == "other"] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_freeze_that_is_made_longer_ends_at_its_later_end(loop: VirtualLoop) -> None:
    said: list[float] = []

    async def tick() -> None:
        await asyncio.sleep(1.0)
        said.append(loop.time())

    process = Process("p")
    loop.spawn(process, tick())
    loop.advance(0.5)
    loop.freeze(process, 2.0)
    loop.advance(1.0)
    loop.freeze(process, 3.0)
    loop.advance(10.0)
    assert said == [4.5]


@pytest.mark.parametrize("steps", range(8))
def test_a_kill_ends_a_process_at_any_await_and_its_finally_blocks_have_no_effect(
    loop: VirtualLoop, steps: int
) -> None:
    port = Port()

    async def inner() -> None:
        try:
            for step in range(4):
                port.say(f"step {step}")
                await asyncio.sleep(0.1)
        finally:
            await asyncio.sleep(0)
            port.say("cleaned up")

    async def outer() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(inner())
                group.create_task(inner())
        except asyncio.CancelledError:
            port.say("cancelled")
            raise
        finally:
            port.say("over")

    process = Process("p")
    loop.spawn(process, outer())
    left = steps

    def kill_later(running: Process) -> None:
        nonlocal left
        if running is process:
            left -= 1
            if left < 0:
                loop.kill(process)

    loop.before_callback = kill_later
    loop.advance(60.0)
    assert not process.alive
    assert not process.tasks
    assert "over" not in port.said
    assert "cleaned up" not in port.said
    assert "cancelled" not in port.said


def test_a_process_may_be_killed_by_its_own_step(loop: VirtualLoop) -> None:
    port, process = Port(), Process("p")

    async def run() -> None:
        try:
            loop.kill(process)
            with pytest.raises(ProcessDeadError):
                port.say("after death")
            await asyncio.sleep(1.0)
            port.said.append("later")
        finally:
            with suppress(ProcessDeadError):
                port.say("finally")

    loop.spawn(process, run())
    loop.advance(10.0)
    assert port.said == []


def test_nothing_that_a_dead_process_was_to_do_happens(loop: VirtualLoop) -> None:
    said: list[str] = []
    process = Process("p")

    async def run() -> None:
        asyncio.get_running_loop().call_later(1.0, said.append, "timer")
        await asyncio.sleep(0.5)

    loop.spawn(process, run())
    loop.advance(0.1)
    loop.kill(process)
    loop.advance(10.0)
    assert said == []
    with pytest.raises(ProcessDeadError):
        loop.spawn(process, run())


def test_an_async_generator_that_is_dropped_is_closed_by_its_own_process(loop: VirtualLoop) -> None:
    closed: list[str] = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            process = current()
            assert process is not None
            process.check_alive()
            closed.append(process.name)

    async def run(ends: bool) -> None:
        async for _ in numbers():
            if ends:
                break
            await asyncio.sleep(3_600.0)

    loop.spawn(Process("a"), run(True))
    dies = Process("b")
    loop.spawn(dies, run(False))
    loop.advance(1.0)
    loop.kill(dies)
    loop.advance(1.0)
    assert closed == ["a"]


def test_a_killed_process_is_unwound_at_once_and_in_silence(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a generator's item, a `finally` block and a task group.

    Python prints what it unwinds by itself.
    """
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    ended: list[str] = []

    async def reads() -> int:
        try:
            await asyncio.sleep(10.0)
        finally:
            process = current()
            assert process is not None
            ended.append(f"reads in {process.name}")
            process.check_alive()
        return 0

    async def items() -> AsyncIterator[int]:
        while True:
            yield await reads()

    async def waits_in_finally() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            for _ in range(2):
                with suppress(BaseException):
                    await asyncio.sleep(1.0)
            ended.append("finally")

    async def of_a_generator() -> None:
        async for _ in items():
            pass

    async def of_a_closed_generator() -> None:
        async with aclosing(items()) as source:  # type: ignore[type-var]
            await asyncio.wait({asyncio.ensure_future(anext(source))})

    async def of_a_group() -> None:
        async with asyncio.timeout(100.0), asyncio.TaskGroup() as group:
            group.create_task(reads())
            group.create_task(waits_in_finally())

    process = Process("p")
    for work in (of_a_generator, of_a_closed_generator, of_a_group):
        loop.spawn(process, work())
    loop.advance(1.0)
    assert ended == []
    loop.kill(process)
    assert sorted(ended) == ["finally", *["reads in p"] * 3]
    gc.collect()
    assert printed == []


def test_sets_of_tasks_have_the_same_order_in_every_run() -> None:
    def run() -> list[int]:
        loop = VirtualLoop(seed=3)
        order: list[int] = []

        async def work(number: int) -> None:
            await asyncio.sleep(0)
            order.append(number)

        async def all_of_them() -> None:
            pending = {asyncio.ensure_future(work(number)) for number in range(50)}
            order.extend(int(task.get_name().split("-")[1]) - base for task in pending)
            await asyncio.wait(pending)

        base = int(asyncio.Task(asyncio.sleep(0), loop=loop).get_name().split("-")[1])
        loop.run_until_complete(all_of_them())
        loop.close()
        return order

    assert run() == run()


def test_waiting_for_what_cannot_come_is_an_error_and_no_hang(loop: VirtualLoop) -> None:
    with pytest.raises(DeadlockError, match="no event is left"):
        loop.run_until_complete(asyncio.Event().wait())
