"""The end of tasks."""

from __future__ import annotations

import asyncio

import pytest

from turboserve import tasks


async def test_a_task_that_swallows_a_cancellation_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.01)
    swallowed = 0

    async def deaf() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if swallowed == 3:
                    raise
                swallowed += 1

    async def fails_at_its_end() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise ValueError("dropped")

    both = asyncio.create_task(deaf()), asyncio.create_task(fails_at_its_end())
    await asyncio.sleep(0)
    await tasks.stop(*both)
    assert swallowed == 3
    assert all(task.done() for task in both)


async def test_nothing_to_end() -> None:
    await tasks.stop()


async def test_background_tasks_are_kept_until_they_end() -> None:
    background, release = tasks.BackgroundTasks(), asyncio.Event()
    first = background.create(release.wait(), "first")
    second = background.add(asyncio.create_task(asyncio.sleep(3600)))
    assert list(background) == [first, second]
    release.set()
    await first
    await asyncio.sleep(0)
    assert list(background) == [second]
    await background.stop()
    assert second.cancelled()
    assert list(background) == []
    await background.wait(0.0)


async def test_a_failure_ends_no_other_background_task() -> None:
    background = tasks.BackgroundTasks()

    async def fails() -> None:
        raise ValueError("own failure")

    other = background.create(asyncio.sleep(3600))
    with pytest.raises(ValueError, match="own failure"):
        await background.create(fails())
    assert not other.done()
    background.cancel()
    await background.wait(60.0)
    assert other.cancelled()
