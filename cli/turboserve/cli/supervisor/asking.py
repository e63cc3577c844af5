"""Asks processes for as long as they live whether they serve, and looks at the disks of those that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from turboserve.cli.supervisor import core
from turboserve.cli.supervisor.logs import LogHub
from turboserve.cli.supervisor.process import Process
from turboserve.cli.supervisor.room import has_room, room
from turboserve.cli.supervisor.spec import NotReady, ProcessSpec, RefusesError, UnhealthyError

ASK_EVERY_S = 5.0
ROOM_EVERY_S = 1.0


class Questions:
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
            if process is not None and self._core.state(spec.name) is core.State.READY:
                await self._ask(spec, process)

    async def _ask(self, spec: ProcessSpec, process: Process) -> None:
        assert spec.alive is not None
        reason, has_space = "", True
        try:
            async with asyncio.timeout(spec.answer_s):
                await spec.alive()
            answer = core.Answer.SERVES
        except UnhealthyError as error:
            answer, reason = core.Answer.FAILS, str(error)
            if isinstance(error, RefusesError):
                has_space = False
            elif spec.directory is not None:
                has_space = await asyncio.to_thread(has_room, spec.directory)
                reason += "" if has_space else f" (the disk is full: {room(spec.directory)})"
        except (NotReady, TimeoutError):
            answer = core.Answer.SILENT
        except Exception as error:
            self._hub.say("question failed", "error", process=spec.name, error=repr(error))
            return
        # The answer is one of this process, and not of the next.
        if self._running(spec.name) is process:
            now_s = asyncio.get_running_loop().time()
            self._obey(self._core.asked(spec.name, answer, now_s, reason=reason, room=has_space))

    async def _watch_rooms(self) -> None:
        """Look at the disks of servers that cannot start, and say when the stack's disk becomes low."""
        while True:
            await asyncio.sleep(ROOM_EVERY_S)
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
