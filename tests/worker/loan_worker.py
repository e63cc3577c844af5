"""An engine with its thread and its part in loans, without the rest of a worker. Also a process of a test.

    python -m tests.worker.loan_worker DIRECTORY WORKER LIMIT_S EXCHANGE_S [SESSION]

SESSION is a session in deficit, which borrows.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from turboserve.bench.sequence_parallel.donor import engine_of
from turboserve.clock import SystemClock
from turboserve.worker.engine import pipeline
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import ChunkReady, SessionSpec
from turboserve.worker.replicas.toyworld import load_toyworld
from turboserve.worker.sequence_parallel.frames import Greeting, PeerChannel
from turboserve.worker.sequence_parallel.group import Group
from turboserve.worker.sequence_parallel.peers import HostDirectory, Identity
from turboserve.worker.sequence_parallel.service import LoanService
from turboserve.worker.service import commands
from turboserve.worker.service.host_platform import EngineThread
from turboserve.worker.service.packager import GeneratedChunk

PROMPT = "a red circle moving left on black"

PROFILES = {"forward": {1: 0.03}, "decode": {1: 0.03}}
"""What a worker measures before it joins."""


class DeclaredProfile(LatencyProfile):
    """L(b) as declared. A busy machine would measure more, and then no session has the credit of a donor."""

    def observe(self, batch: int, seconds: float) -> None:
        """Measure nothing."""


class PatientDirectory(HostDirectory):
    """Its groups wait `exchange_s` for an exchange. A donor's sessions need not outlast that.

    A lead of 3 s is less than what an exchange may take on a busy machine.
    """

    def __init__(self, directory: Path, worker: str, exchange_s: float) -> None:
        super().__init__(directory, worker)
        self._exchange_s = exchange_s

    async def group(self, channel: PeerChannel, own: Identity, agreed: Greeting, *, first: bool) -> Group:
        """See `HostDirectory.group`."""
        return await super().group(channel, replace(own, limit_s=self._exchange_s), agreed, first=first)


class LoanWorker:
    """One worker of the test's host."""

    def __init__(self, directory: Path, worker: str, limit_s: float, exchange_s: float) -> None:
        """`limit_s`: least credit of a donor's sessions. `exchange_s`: longest time of one exchange."""
        self.chunks: list[ChunkReady] = []
        with patch.object(pipeline, "LatencyProfile", DeclaredProfile):
            engine = engine_of(load_toyworld(), profiles=PROFILES)
        self.thread = EngineThread(engine, self._delivered, SystemClock())
        identity = Identity(worker, engine.fingerprint, engine.device, limit_s)
        network = PatientDirectory(directory, worker, exchange_s)
        self.service = LoanService(identity, self.thread, network, time.monotonic, self._changed)
        self.changes = 0
        """Number of loans that have begun and of those that are over."""
        self.thread.start()
        self.thread.submit(commands.GenerateUntil(math.inf))

    def _changed(self) -> None:
        self.changes += 1

    def _delivered(self, item: Any) -> None:
        if isinstance(item, GeneratedChunk):
            self.chunks.append(item.ready)

    async def begin(self, session: str, seed: int = 3) -> None:
        """Admit a session."""

        def admit(engine: Engine) -> None:
            engine.admit(SessionSpec(session, PROMPT, seed), time.monotonic())

        await asyncio.wrap_future(self.thread.adopt(session, 1, admit))

    async def playhead(self, session: str, seconds: float) -> None:
        """Set the viewer's position."""
        await asyncio.wrap_future(
            self.thread.call(lambda engine: engine.playhead(session, seconds, now=time.monotonic()))
        )


async def main(directory: str, worker: str, limit_s: str, exchange_s: str, session: str = "") -> None:
    """Take part in loans until the process is killed."""
    torch.set_num_threads(1)
    one = LoanWorker(Path(directory), worker, float(limit_s), float(exchange_s))
    if session:
        await one.begin(session)
        await one.playhead(session, 1e6)
    await one.service.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
