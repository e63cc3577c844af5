"""Asks processes for as long as they live whether they serve, and looks at the disks of those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from turboserve.cli.supervisor import core
from turboserve.cli.supervisor.disk_space import has_room, room
from turboserve.cli.supervisor.logs import LogHub
from turboserve.cli.supervisor.process import Process
from turboserve.cli.supervisor.spec import (
    NotReadyError,
    ProcessSpec,
    ServerFullError,
    ServerUnhealthyError,
    ServerUnresponsiveError,
)

ASK_EVERY_S = 5.0
ROOM_EVERY_S = 1.0


class HealthChecks:
    """Questions to `specs`; each answer goes to `supervision`, and its commands to `obey`."""

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        supervision: core.Supervision,
        hub: LogHub,
        running: Callable[[str], Process | None],
        obey: Callable[[Sequence[core.Command]], None],
    ) -> None:
        self._specs = list(specs)
        self._core, self._hub = supervision, hub
        self._running, self._obey = running, obey
        self._low = False
        self._asked: set[asyncio.Future[None]] = set()
        """Questions under way, those that were given up among them."""

    async def run(self) -> None:
        """Until cancelled. Each process is asked by itself: one that is slow keeps no other waiting."""
        async with asyncio.TaskGroup() as group:
            for spec in self._specs:
                group.create_task(self._keep_asking(spec))
            group.create_task(self._watch_rooms())

    async def _keep_asking(self, spec: ProcessSpec) -> None:
        while spec.alive is not None:
            await asyncio.sleep(spec.ask_every_s or ASK_EVERY_S)
            process = self._running(spec.name)
            if process is None or self._core.state(spec.name) is not core.State.READY:
                continue
            try:
                await self._ask(spec, process)
            except Exception as error:
                # The next question is asked all the same: no other check notices a process that hangs.
                self._hub.say("question failed", "error", process=spec.name, error=repr(error))

    async def _ask(self, spec: ProcessSpec, process: Process) -> None:
        reason, has_space = "", True
        try:
            await self._answer(spec)
            answer = core.HealthAnswer.SERVES
        except ServerUnhealthyError as error:
            answer, reason = core.HealthAnswer.FAILS, str(error)
            if isinstance(error, ServerFullError):
                has_space = False
            elif spec.directory is not None:
                has_space = await asyncio.to_thread(has_room, spec.directory)
                reason += "" if has_space else f" (the disk is full: {room(spec.directory)})"
        except NotReadyError:
            answer = core.HealthAnswer.SILENT
        # The answer is one of this process, and not of the next.
        if self._running(spec.name) is process:
            now_s = asyncio.get_running_loop().time()
            self._obey(self._core.asked(spec.name, answer, now_s, reason=reason, room=has_space))

    async def _answer(self, spec: ProcessSpec) -> None:
        """Ask, and wait for `answer_s`. Raises what the question raises, ServerUnresponsiveError if there is
        no answer.

        The question is a task of its own. A client library that catches cancellations, or is cancelled by its
        own connection, delays and ends no other question.
        """
        assert spec.alive is not None
        question = asyncio.ensure_future(spec.alive())
        self._asked.add(question)
        question.add_done_callback(self._answered)
        try:
            await asyncio.wait([question], timeout=spec.answer_s)
        finally:
            question.cancel()
        if not question.done() or question.cancelled():
            raise ServerUnresponsiveError(f"{spec.name} does not answer")
        question.result()

    def _answered(self, question: asyncio.Future[None]) -> None:
        self._asked.discard(question)
        if not question.cancelled():
            # Looked at, so that asyncio does not complain of an error that came after the time-out.
            question.exception()

    async def _watch_rooms(self) -> None:
        """Look at the disks of servers that cannot start, and say when the stack's disk becomes low."""
        while True:
            await asyncio.sleep(ROOM_EVERY_S)
            try:
                await self._look_at_rooms()
            except Exception as error:
                self._hub.say("disk not checked", "error", error=repr(error))

    async def _look_at_rooms(self) -> None:
        for spec in self._specs:
            if spec.directory is None or not self._core.watches_room(spec.name):
                continue
            has_space = await asyncio.to_thread(has_room, spec.directory)
            self._obey(self._core.room_checked(spec.name, has_space, asyncio.get_running_loop().time()))
        for spec in self._specs:
            if spec.directory is not None:
                self._tell_low(spec.directory)
                # They share the stack's data folder.
                break

    def _tell_low(self, directory: Path) -> None:
        with suppress(OSError):
            found = room(directory)
            if found.low is not self._low:
                self._low = found.low
                event, level = ("disk is low", "error") if found.low else ("disk has room again", "info")
                self._hub.say(event, level, path=str(directory), left=str(found))
