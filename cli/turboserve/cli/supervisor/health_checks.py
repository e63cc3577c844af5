"""Health checks of ready processes, and of the disks of processes that fail."""

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
    """Runs the health checks of `specs`. `supervision` gets each result, and `obey` gets its commands."""

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
        """Running health checks, including those after their time limit."""

    async def run(self) -> None:
        """Run until cancelled. Each process has its own task, so that a slow process delays no other."""
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
                # Continue with the next health check, since nothing else detects a process that hangs.
                self._hub.log("health check failed", "error", process=spec.name, error=repr(error))

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
        # Ignore the answer if the process was replaced meanwhile.
        if self._running(spec.name) is process:
            now_s = asyncio.get_running_loop().time()
            self._obey(self._core.asked(spec.name, answer, now_s, reason=reason, room=has_space))

    async def _answer(self, spec: ProcessSpec) -> None:
        """Run a health check for at most `answer_s`.

        Raises what the check raises, and ServerUnresponsiveError if there is no answer. The check runs in its
        own task. A client library that catches cancellations, or that its own connection cancels, therefore
        affects no other check.
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
            # Retrieve the error, so that asyncio does not log one that came after the timeout.
            question.exception()

    async def _watch_rooms(self) -> None:
        """Check the disks of servers that cannot start, and log when the stack's disk becomes low."""
        while True:
            await asyncio.sleep(ROOM_EVERY_S)
            try:
                await self._look_at_rooms()
            except Exception as error:
                self._hub.log("disk not checked", "error", error=repr(error))

    async def _look_at_rooms(self) -> None:
        for spec in self._specs:
            if spec.directory is None or not self._core.watches_room(spec.name):
                continue
            has_space = await asyncio.to_thread(has_room, spec.directory)
            self._obey(self._core.room_checked(spec.name, has_space, asyncio.get_running_loop().time()))
        for spec in self._specs:
            if spec.directory is not None:
                self._tell_low(spec.directory)
                # One check is enough, since all servers share the stack's data folder.
                break

    def _tell_low(self, directory: Path) -> None:
        with suppress(OSError):
            found = room(directory)
            if found.low is not self._low:
                self._low = found.low
                event, level = ("disk is low", "error") if found.low else ("disk has room again", "info")
                self._hub.log(event, level, path=str(directory), left=str(found))
