"""A worker that draws its frames instead of computing them: real bus, real fence, real H.264.

It runs as a program with the settings of a worker in its environment, so that the gateway can be tested
alone. Any prompt that names a color and a shape gives a picture of them at once.
"""

from __future__ import annotations

import asyncio
import os
import time

import numpy as np
from numpy.typing import NDArray

from turboserve.allocation.classes import SessionClass
from turboserve.audience import Audience
from turboserve.bus import append, last_entry
from turboserve.config import Settings
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.control_declarations import ControlDeclaration
from turboserve.contracts.errors import FencedError, TurboServeError, WorkerGoneError
from turboserve.contracts.fidelity import Tier
from turboserve.contracts.requests import Renew
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.worker_offers import FrameSize
from turboserve.contracts.workers import (
    Assignment,
    HeldSession,
    LoadReport,
    MigrationReport,
    MigrationStage,
    Playhead,
)
from turboserve.ids import new_id
from turboserve.service import Runtime, run
from turboserve.subjects import ASSIGN, CHUNK, LOAD, OWN, PLAYHEAD, RENEW
from turboserve.worker.media import FragmentEncoder

COLOURS = {
    "red": (230, 40, 40),
    "blue": (40, 70, 230),
    "green": (40, 180, 60),
    "yellow": (240, 220, 50),
}
FPS, FIRST, EACH = 16, 9, 12
LEAD_S = 3.0
MODEL = os.environ.get("DRAWN_MODEL", "toyworld")
SIDE = SessionClass.of_name(MODEL).width or 64
CAPACITY = int(os.environ.get("DRAWN_CAPACITY", "8"))
MIGRATIONS = os.environ.get("DRAWN_MIGRATIONS", "")
"""Result of migrations to this worker:

`yes`, `never` (no report), `fail`; empty: no migration is possible.
"""
NAME = os.environ.get("TURBOSERVE_WORKER_ID")
"""Name of the worker, if a pool has started it."""
DIRECTIONS = ["stop", "left", "right", "up", "down", "up-left", "up-right", "down-left", "down-right"]
CONTROLS = (
    ControlDeclaration(
        name="steer",
        description="Where the figure moves.",
        value_schema={"type": "string", "enum": DIRECTIONS},
    ),
)
RENEW_S = 0.6
"""Most of what an idle pool costs are these renewals."""
COMPUTE_S = float(os.environ.get("DRAWN_COMPUTE_S", "0.05"))


class DrawnWorker:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._bus = runtime, runtime.bus
        self._id = NAME or new_id("wrk")
        self._started_at = time.time()
        self._rows: dict[str, SessionRecord] = {}
        self._making: dict[str, asyncio.Task[None]] = {}
        self._next: dict[str, int] = {}
        self._playheads: dict[str, float] = {}
        self._audiences: dict[str, Audience] = {}
        self._arrivals: dict[str, MigrationReport] = {}
        self._shown: dict[str, tuple[int, float]] = {}
        """By session: the newest control that dropped the buffer, and where its viewers skip to, seconds."""
        self._drops: dict[str, int] = {}
        """By session: the first chunk under that control."""
        self._encoder = FragmentEncoder()

    async def start(self) -> None:
        await self._bus.subscribe(ASSIGN, self._id, self._assigned)
        await self._bus.subscribe(PLAYHEAD, "*", self._played)
        self._runtime.spawn(self._renew(), "renew")

    async def _assigned(self, message: Assignment, _data: bytes) -> None:
        if message.incoming is not None:
            await self._arrive(message.incoming.record)
        self._take(message.record)

    async def _played(self, message: Playhead, _data: bytes) -> None:
        audience = self._audiences.setdefault(message.session, Audience())
        self._playheads[message.session] = audience.update(message, time.monotonic()).playhead_s

    async def _renew(self) -> None:
        while True:
            report = LoadReport(
                worker=self._id,
                model=MODEL,
                capacity=CAPACITY,
                controls=CONTROLS,
                frame=FrameSize(width=SIDE, height=SIDE),
                chunk_latency_s={1: COMPUTE_S},
                transfer=("drawn://",) if MIGRATIONS else (),
                host="drawn",
                pool_member=os.environ.get("TURBOSERVE_POOL_MEMBER"),
                migrations=tuple(self._arrivals.values()),
                started_at=self._started_at,
                sessions=tuple(
                    HeldSession(session=name, epoch=row.epoch, next_chunk=self._next.get(name, 0))
                    for name, row in self._rows.items()
                ),
            )
            try:
                await self._bus.publish(LOAD, self._id, report)
                renewal = await self._bus.call(RENEW, Renew(load=report))
                for row in renewal.assigned:
                    self._take(row)
                for incoming in renewal.incoming:
                    await self._arrive(incoming.record)
                migrations = {one.record.migration for one in renewal.incoming}
                self._arrivals = {
                    name: report for name, report in self._arrivals.items() if report.migration in migrations
                }
                for name in set(self._rows) - {row.id for row in renewal.assigned}:
                    self._rows.pop(name)
            except WorkerGoneError:
                # The worker was silent for too long. A pool replaces the workers that it named.
                if not NAME:
                    await self._join_again()
            except TurboServeError:
                pass
            await asyncio.sleep(RENEW_S)

    async def _join_again(self) -> None:
        """Continue as a new worker: the id of a worker that was declared gone never comes back."""
        self._id, self._started_at = new_id("wrk"), time.time()
        self._rows.clear()
        self._arrivals.clear()
        await self._bus.subscribe(ASSIGN, self._id, self._assigned)

    async def _arrive(self, row: SessionRecord) -> None:
        """Receive a session.

        Its state is the number of its next chunk, and the source draws nothing while it migrates. The state
        is complete once the log has not grown for longer than a chunk takes.
        """
        if MIGRATIONS == "never" or row.migration is None:
            return
        if MIGRATIONS == "fail":
            report = MigrationReport(
                session=row.id, migration=row.migration, stage=MigrationStage.FAILED, reason="told to fail"
            )
            self._arrivals[row.id] = report
            return
        before = -1
        while (count := await self._count(row.id)) != before:
            before = count
            await asyncio.sleep(4 * COMPUTE_S)
        self._arrivals[row.id] = MigrationReport(
            session=row.id,
            migration=row.migration,
            stage=MigrationStage.VERIFIED,
            next_chunk=count,
            digest="drawn",
            bytes_copied=8,
            seconds=4 * COMPUTE_S,
        )

    async def _count(self, name: str) -> int:
        last = await last_entry(self._bus, CHUNK.stream, CHUNK.of(name))
        return 0 if last is None else ChunkHeader.from_headers(last.headers).index + 1

    def _take(self, row: SessionRecord) -> None:
        known = self._rows.get(row.id)
        if row.worker != self._id:
            self._rows.pop(row.id, None)
        elif known is None or known.version <= row.version:
            self._rows[row.id] = row
            if row.id not in self._making or self._making[row.id].done():
                self._making[row.id] = asyncio.create_task(self._make(row.id))

    async def _make(self, name: str) -> None:
        index = await self._count(name)
        while (row := self._rows.get(name)) is not None and not row.phase.ended:
            self._next[name] = index
            first = 0 if index == 0 else FIRST + (index - 1) * EACH
            if row.drop_buffer_seq > self._shown.get(name, (0, 0.0))[0]:
                self._shown[name] = row.drop_buffer_seq, first / FPS
                self._drops[name] = index
            lead_s = LEAD_S if row.max_lead_s is None else max(row.max_lead_s, EACH / FPS)
            playhead_s = max(row.playhead_s, self._playheads.get(name, 0.0))
            ahead = first / FPS >= max(playhead_s, self._shown.get(name, (0, 0.0))[1]) + lead_s
            if row.phase is not Phase.ACTIVE or row.own_revision is None or ahead:
                await asyncio.sleep(0.03)
                continue
            await asyncio.sleep(COMPUTE_S)
            try:
                await self._publish(row, index, first)
                index += 1
            except FencedError:
                self._rows.pop(name, None)
            except TurboServeError:
                await asyncio.sleep(0.2)

    async def _publish(self, row: SessionRecord, index: int, first: int) -> None:
        count = FIRST if index == 0 else EACH
        made = self._encoder.encode(draw(row.prompt, count), index=index, first_frame=first, fps=FPS)
        header = ChunkHeader(
            session=row.id,
            index=index,
            epoch=row.epoch,
            worker=self._id,
            control_seq=row.control_seq,
            first_frame=first,
            frames=count,
            fps=FPS,
            width=SIDE,
            height=SIDE,
            codec=made.codec,
            init_bytes=len(made.init),
            compute_s=COMPUTE_S,
            drops_buffer=self._drops.get(row.id) == index,
            slack_s=first / FPS - self._playheads.get(row.id, 0.0),
            credit_s=first / FPS - self._playheads.get(row.id, 0.0) - COMPUTE_S,
            tier=Tier.RELAXED,
            published_at=time.time(),
        )
        assert row.own_revision is not None
        await append(
            self._bus,
            CHUNK.by(row.id, self._id),
            made.init + made.fragment,
            message_id=f"{row.id}:{index}",
            headers=header.to_headers(),
            expect=(OWN.of(row.id), row.own_revision),
        )


def draw(prompt: str, count: int) -> NDArray[np.uint8]:
    """Draw `count` frames [F, H, W, 3] of the shape and color that `prompt` names, moving as it says."""
    colour = next((value for word, value in COLOURS.items() if word in prompt), (200, 200, 200))
    frames = np.zeros((count, SIDE, SIDE, 3), np.uint8)
    y, x = np.mgrid[:SIDE, :SIDE]
    for number, frame in enumerate(frames):
        shift = number - count // 2
        cx = SIDE // 2 - (shift if "left" in prompt else 0)
        cy = SIDE // 2 - (shift if "up" in prompt else 0)
        if "square" in prompt:
            inside = (abs(x - cx) < 14) & (abs(y - cy) < 14)
        else:
            inside = (x - cx) ** 2 + (y - cy) ** 2 < 16**2
        frame[inside] = colour
    return frames


async def start(runtime: Runtime) -> None:
    await DrawnWorker(runtime).start()


if __name__ == "__main__":
    run("worker", Settings(), start)
