"""Probes of processes: whatever the outcome of one, the next one is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import eventually
from turboserve.cli.supervisor import core
from turboserve.cli.supervisor.health_checks import HealthChecks
from turboserve.cli.supervisor.logs import LogHub
from turboserve.cli.supervisor.process import Process
from turboserve.cli.supervisor.spec import ProcessSpec, ServerUnhealthyError

LIMIT_S = 60.0


class Asked:
    """One process, its core, and the core's commands."""

    def __init__(
        self, alive: Callable[[], Awaitable[None]], path: Path, directory: Path | None = None
    ) -> None:
        spec = ProcessSpec(
            member=core.Member("edge", silent_limit=2, failing_limit=2),
            kind="server",
            command=[],
            probe=alive,
            alive=alive,
            ask_every_s=0.01,
            answer_s=0.05,
            directory=directory,
        )
        self.core = core.Supervision([spec.member])
        self.core.start(0.0)
        self.core.ready("edge", 0.0)
        self.commands: list[core.Command] = []
        self.hub = LogHub(path, "text")
        process: Any = object()
        self._process: Process = process
        self._questions = HealthChecks([spec], self.core, self.hub, lambda _name: self._process, self._obey)

    def _obey(self, commands: Sequence[core.Command]) -> None:
        self.commands += commands

    async def until(self, command: core.Command) -> None:
        """Probe until the core issues the command."""
        asking = asyncio.create_task(self._questions.run())
        await eventually(lambda: asking.done() or command in self.commands, LIMIT_S)
        assert not asking.done(), "the checks have ended"
        asking.cancel()
        await asyncio.wait([asking])


async def test_a_question_that_catches_its_cancellation_is_silence(tmp_path: Path) -> None:
    """Client libraries catch the cancellation while they close their connection."""
    held = asyncio.Event()

    async def alive() -> None:
        while not held.is_set():
            try:
                await held.wait()
            except asyncio.CancelledError:
                continue

    asked = Asked(alive, tmp_path)
    await asked.until(core.Kill("edge"))
    held.set()


async def test_a_question_that_is_cancelled_from_within_is_silence(tmp_path: Path) -> None:
    """A client library cancels its future when its connection is lost."""

    async def alive() -> None:
        raise asyncio.CancelledError

    await Asked(alive, tmp_path).until(core.Kill("edge"))


@pytest.mark.parametrize("error", [RuntimeError("a fault of the question"), FileNotFoundError("no folder")])
async def test_after_a_question_that_failed_the_next_one_is_asked(tmp_path: Path, error: Exception) -> None:
    asked = 0

    async def alive() -> None:
        nonlocal asked
        asked += 1
        if asked <= 3:
            raise error
        raise ServerUnhealthyError("the reason")

    await Asked(alive, tmp_path).until(core.Terminate("edge"))
    assert asked >= 5


async def test_a_folder_that_is_gone_ends_no_question(tmp_path: Path) -> None:
    async def alive() -> None:
        raise ServerUnhealthyError("the reason")

    asked = Asked(alive, tmp_path, directory=tmp_path / "gone")
    await asked.until(core.Terminate("edge"))
