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
