"""A viewer's place: an idle session is resumed until it is active; a failed entry leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turboserve.bus.chunk_log import StreamStart
from turboserve.clock import SystemClock
from turboserve.contracts.errors import NoCapacityError, TransitionError, TurboServeError, UnknownModelError
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.gateway.stream import watch
from turboserve.gateway.stream.watch import Watch


def record(activity: Activity = Activity.IDLE) -> SessionRecord:
    return SessionRecord(
        id="ses_a",
        tenant="t",
        model="m",
        prompt="x",
        seed=1,
        phase=Phase.SUSPENDED,
        activity=activity,
        version=3,
        epoch=1,
        created_at=1.0,
        updated_at=1.0,
    )


class Room:
    """The part of a gateway that a Watch needs: resuming raises `answers` in turn."""

    def __init__(self, answers: list[TurboServeError | None], broken: bool = False) -> None:
        self.answers = answers
        self.asked = 0
        self.viewers: set[str] = set()
        self.broken = broken
        self.clock = SystemClock()
        self.timeline = self.sessions = self

    async def joined(self, _session: str, viewer: str, *_: Any, **__: Any) -> None:
        self.viewers.add(viewer)

    async def left(self, _session: str, viewer: str) -> None:
        self.viewers.discard(viewer)

    async def playing(self, *_: Any) -> None:
        if self.broken:
            raise RuntimeError("broken")

    def remember(self, row: SessionRecord) -> SessionRecord:
        return row

    async def resume(self, *_: Any) -> None:
        self.asked += 1
        answer = self.answers[self.asked - 1]
        if answer is not None:
            raise answer


def watching(room: Room) -> Watch:
    gateway: Any = room
    return Watch(gateway, record(), StreamStart(0, 0.0, 0), self_paced=False)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "WAKE_RETRIES_S", (0.0,))
    monkeypatch.setattr(watch, "WAKE_AGAIN_S", 0.0)


async def test_an_idle_session_is_asked_for_until_there_is_room() -> None:
    full, away = NoCapacityError("full", retry_after_s=1.0), UnknownModelError("no worker serves m")
    room = Room([full] * 20 + [away] * 20 + [None])
    async with watching(room) as one:
        assert one._waking is not None
        await asyncio.wait_for(one._waking, 60)
    assert room.asked == 41


async def test_a_session_that_may_not_resume_is_asked_for_once() -> None:
    room = Room([TransitionError("ended")])
    async with watching(room) as one:
        assert one._waking is not None
        await asyncio.wait_for(one._waking, 60)
    assert room.asked == 1


async def test_a_session_that_was_paused_meanwhile_is_left_alone() -> None:
    room = Room([])
    async with watching(room) as one:
        one.record = record(Activity.PAUSED)
        assert one._waking is not None
        await asyncio.wait_for(one._waking, 60)
    assert room.asked == 0


async def test_who_leaves_asks_no_more() -> None:
    room = Room([NoCapacityError("full", retry_after_s=1.0)] * 1_000_000)
    async with watching(room) as one:
        await asyncio.sleep(0)
        task = one._waking
    assert task is not None
    await asyncio.wait([task], timeout=60)
    assert task.cancelled()


async def test_a_viewer_who_could_not_enter_is_not_counted() -> None:
    room = Room([], broken=True)
    with pytest.raises(RuntimeError, match="broken"):
        async with watching(room):
            pass
    assert not room.viewers
