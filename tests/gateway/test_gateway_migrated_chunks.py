"""A viewer of a session that migrates between identities, and entries that others append to its log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.js import api

from tests.helpers.chunk_headers import chunk_header
from turboserve.bus import Bus, append
from turboserve.bus.chunk_log import ChunkLog, StreamStart
from turboserve.cli.embedded import NatsServer
from turboserve.config import Settings
from turboserve.contracts.chunks import Ownership
from turboserve.contracts.errors import ChunkGoneError
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.ids import new_id
from turboserve.subjects import CHUNK, CHUNK_UNNAMED, CHUNKS, OWN

SESSION = "ses_a"
KEPT = 10
LIMIT_S = 120.0


class Scene:
    """A session that workers write, as the gateway reads it."""

    def __init__(self, admin: Bus, gateway: Bus) -> None:
        self.admin, self.log = admin, ChunkLog(gateway)
        self.epoch = self.next = self.began = 0
        self.worker = ""

    async def place(self, worker: str) -> None:
        self.epoch, self.worker, self.began = self.epoch + 1, worker, self.next
        body = Ownership(session=SESSION, epoch=self.epoch, worker=worker).to_bytes()
        await append(self.admin, OWN.of(SESSION), body, message_id=new_id("own"), deadline_s=LIMIT_S)

    async def make(self, count: int, *, unnamed: bool = False) -> None:
        for _ in range(count):
            subject = CHUNK_UNNAMED.of(SESSION) if unnamed else CHUNK.by(SESSION, self.worker)
            await self.append(subject, self.next)
            self.next += 1

    async def append(self, subject: str, index: int) -> None:
        header = chunk_header(SESSION, index, self.epoch, self.worker, began=self.began)
        await append(
            self.admin,
            subject,
            b"video",
            message_id=new_id("x"),
            headers=header.to_headers(),
            deadline_s=LIMIT_S,
        )

    def record(self) -> SessionRecord:
        return SessionRecord(
            id=SESSION,
            tenant="t",
            model="m",
            prompt="x",
            seed=1,
            phase=Phase.ACTIVE,
            version=3,
            epoch=self.epoch,
            next_chunk=self.next,
            playhead_s=0.0,
            created_at=1.0,
            updated_at=1.0,
        )

    async def made(self) -> int:
        return self.next

    async def watched(self, start: StreamStart, count: int) -> list[int]:
        found: list[int] = []
        async with asyncio.timeout(LIMIT_S):
            async for chunk in self.log.follow(SESSION, start, asyncio.Event(), self.made):
                found.append(chunk.header.index)
                if len(found) == count:
                    break
        return found


@pytest.fixture
async def scene(nats_url: str, nats_server: NatsServer) -> AsyncIterator[Scene]:
    admin = await Bus.connect("admin", Settings(nats_url=nats_server.url("admin")))
    gateway = await Bus.connect("gateway", Settings(nats_url=nats_server.url("gateway")))
    await admin.jetstream(LIMIT_S).add_stream(
        api.StreamConfig(
            name=CHUNKS,
            subjects=[OWN.every, CHUNK.every],
            max_msgs_per_subject=KEPT,
            # Every test creates the stream again: the broker may still be deleting the last one's files.
            storage=api.StorageType.MEMORY,
            allow_direct=True,
            republish=api.RePublish(src=">", dest="live.>"),
        )
    )
    scene = Scene(admin, gateway)
    await scene.log.listen()
    yield scene
    await admin.jetstream(LIMIT_S).delete_stream(CHUNKS)
    await gateway.close()
    await admin.close()


async def test_viewers_play_through_migrations_between_identities(scene: Scene) -> None:
    await scene.place("wk1_a")
    early = asyncio.create_task(scene.watched(StreamStart(0, 0.0, 0), 14))
    await scene.make(4)
    await scene.place("wk2_a")
    await scene.make(3)
    await scene.place("wk1_b")
    await scene.make(3)
    late = asyncio.create_task(scene.watched(await scene.log.at(scene.record(), 0.0), 14))
    behind = asyncio.create_task(scene.watched(await scene.log.after(scene.record(), 4), 9))
    await scene.place("wk2_a")
    await scene.make(4)
    assert await early == await late == list(range(14))
    assert await behind == list(range(5, 14))


async def test_what_others_append_hides_nothing_and_moves_no_viewer(scene: Scene) -> None:
    await scene.place("wk1_a")
    early = asyncio.create_task(scene.watched(StreamStart(0, 0.0, 0), KEPT))
    for _ in range(KEPT):
        await scene.make(1)
        for step in (1, 4, 1000):
            await scene.append(CHUNK.by(SESSION, "wk2_a"), scene.next + step)
    assert await early == list(range(KEPT))
    start = await scene.log.at(scene.record(), 0.0)
    assert (start.index, start.made_s) == (0, KEPT * 0.75)
    assert await scene.watched(start, KEPT) == list(range(KEPT))


async def test_chunks_that_are_missing_in_the_middle_are_gone(scene: Scene) -> None:
    """After a migration away and back, the broker keeps chunks 4 to 6 of the one identity.

    Of the other identity it keeps chunks only from 12 on.
    """
    await scene.place("wk1_a")
    await scene.make(4)
    await scene.place("wk2_a")
    await scene.make(3)
    start = await scene.log.after(scene.record(), 3)
    viewer = scene.log.follow(SESSION, start, asyncio.Event(), scene.made)
    assert [(await anext(viewer)).header.index for _ in range(3)] == [4, 5, 6]
    await scene.place("wk1_a")
    await scene.make(KEPT + 5)
    with pytest.raises(ChunkGoneError):
        await asyncio.wait_for(anext(viewer), LIMIT_S)
    for index in (3, 5, 6, 9):
        with pytest.raises(ChunkGoneError) as gone:
            await scene.log.after(scene.record(), index)
        assert gone.value.limit == 12
    start = await scene.log.at(scene.record(), 0.0)
    assert start.index == 12
    assert await scene.watched(start, KEPT) == list(range(12, 22))


async def test_viewers_go_on_over_an_upgrade(scene: Scene) -> None:
    jetstream = scene.admin.jetstream(LIMIT_S)
    config = (await jetstream.stream_info(CHUNKS)).config
    await jetstream.update_stream(config.evolve(subjects=[OWN.every, CHUNK_UNNAMED.every]))
    await scene.place("wrk_a")
    await scene.make(5, unnamed=True)
    await jetstream.update_stream(config)
    early = asyncio.create_task(scene.watched(await scene.log.after(scene.record(), 1), 6))
    await scene.place("wrk_b")
    await scene.make(3)
    assert await early == list(range(2, 8))
    assert await scene.watched(await scene.log.at(scene.record(), 0.0), 8) == list(range(8))
    assert (await scene.log.after(scene.record(), 2)).index == 3
