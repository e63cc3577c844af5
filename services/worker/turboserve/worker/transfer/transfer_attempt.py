"""One transfer attempt of a target, as its source sees it: what was sent, and how the two wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from turboserve.worker.transfer.channel import Channel, unexpected
from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import TransferProtocolError
from turboserve.worker.transfer.frames import Frame, Open, Taken, Verified, Wait
from turboserve.worker.transfer.link import Link

WAIT_S = 0.5
"""Interval at which a waiting target receives a `Wait` frame, seconds."""

T = TypeVar("T")
F = TypeVar("F", Taken, Verified)


@dataclass(eq=False)
class TransferAttempt:
    """One connection over which a source sends a session's state."""

    opened: Open
    channel: Channel
    link: Link
    deadline: Deadline
    sent: dict[str, object] = field(default_factory=dict)
    """Identity stamps of the pages that the target has, by page."""
    prints: dict[str, bytes] = field(default_factory=dict)
    rounds: int = 0
    bytes_copied: int = 0
    bytes_per_s: float = 0.0
    """Transfer rate of the last round, hashing included, bytes per second; 0: there was none."""

    async def receive_frame(self, kind: type[F]) -> F:
        """Receive the next frame, which must be of this kind. Raises `TransferError`."""
        frame = await self._next_frame()
        if not isinstance(frame, kind):
            raise unexpected(frame)
        return frame

    async def until_taken(self, sending: Coroutine[Any, Any, T]) -> T:
        """Send a round until the target has taken it.

        While sending, also read the control channel, so that a refusal ends the transfer at once. A target
        that has everything earlier receives `Wait` frames.
        """
        task = asyncio.ensure_future(sending)
        control_frame = asyncio.ensure_future(self.receive_frame(Taken))
        try:
            while waiting := [each for each in (control_frame, task) if not each.done()]:
                done, _ = await asyncio.wait(
                    waiting, timeout=self.deadline.left(WAIT_S), return_when=asyncio.FIRST_COMPLETED
                )
                for each in (control_frame, task):
                    if each in done:
                        each.result()
                if control_frame.done() and not done:
                    await self.channel.send(Wait(), self.deadline.left())
            sent, taken = task.result(), control_frame.result()
        finally:
            await _ended(task, control_frame)
        if taken.number != self.rounds:
            raise TransferProtocolError(f"round: {taken.number} was taken, {self.rounds} was sent")
        return sent

    async def meanwhile(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Wait for `waiting` and send `Wait` frames. A frame or a hang-up of the target raises an error."""
        task = asyncio.ensure_future(waiting)
        control_frame = asyncio.ensure_future(self._next_frame())
        try:
            while True:
                await asyncio.wait(
                    [task, control_frame],
                    timeout=self.deadline.left(WAIT_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if task.done():
                    return task.result()
                if control_frame.done():
                    raise unexpected(control_frame.result())
                await self.channel.send(Wait(), self.deadline.left())
        finally:
            await _ended(task, control_frame)

    async def _next_frame(self) -> Frame:
        return await self.channel.receive(self.deadline.left())


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
