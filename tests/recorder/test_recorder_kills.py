"""kill -9 of the recorder at every step, with a real broker: every chunk lands exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from obstore.store import LocalStore

from tests.helpers.service_process import Service
from tests.helpers.waiting import eventually
from tests.recorder.conftest import check_stored
from tests.recorder.crashing_recorder import points
from tests.state_store.state_store_harness import Harness, MemoryServers
from turboserve import recording_subjects
from turboserve.bus import Bus
from turboserve.cli.embedded import NatsServer
from turboserve.contracts.errors import NotFoundError
from turboserve.contracts.recordings import RecordingRecord, RecordingRef, RecordingState
from turboserve.contracts.sessions import SessionRecord
from turboserve.recorder.storage import Storage
from turboserve.service import Runtime
from turboserve.simulation.runtime.hot import MemoryHotStore
from turboserve.state_store.composition import compose
from turboserve.state_store.settings import Settings

SEGMENT_S = 2.25
"""Three chunks."""
WRITING = [point for point in points() if "deletion" not in point and "forgotten" not in point]
DELETING = [point for point in points() if point not in WRITING]


@asynccontextmanager
async def state_store(settings: Settings) -> AsyncIterator[None]:
    """The state store in this process, on the real broker, with its databases in memory."""
    servers = MemoryServers()
    runtime = Runtime("state-store", settings, await Bus.connect("state-store", settings))
    try:
        await runtime.watch_streams()
        await compose(runtime, settings, servers.database(settings), MemoryHotStore(servers.redis))
        yield
    finally:
        runtime.stopping.set()
        for close in reversed(runtime._closers):
            await close()
        await runtime._tasks.stop()
        await runtime.bus.close()


class Scene:
    """A session whose chunks the test appends, and a recorder that dies."""

    def __init__(self, api: Harness, recorder: Service, folder: Path) -> None:
        self.api, self.recorder = api, recorder
        self.storage = Storage(LocalStore(folder), 30.0)

    async def record(self, recording: str) -> SessionRecord:
        worker = await self.api.worker("toy", 64)
        return await self.api.place(await self.api.create("toy", recording=recording), worker)

    async def append(self, session: SessionRecord, indexes: range) -> None:
        for index in indexes:
            await self.api.chunk(session, index, f"<{index}>".encode())

    async def row(self, recording: str) -> RecordingRecord:
        return await self.api.bus.call(recording_subjects.GET_RECORDING, RecordingRef(recording=recording))

    async def dead(self) -> None:
        """Wait until the recorder has killed itself."""
        process = self.recorder._process
        assert process is not None
        await eventually(lambda: process.poll() is not None, what=self.recorder.logged)
        self.recorder.end()

    async def until_state(self, recording: str, state: RecordingState) -> RecordingRecord:
        async def reached() -> bool:
            return (await self.row(recording)).state is state

        await eventually(reached, what=self.recorder.logged)
        return await self.row(recording)


@pytest.fixture
async def scene(nats_url: str, nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Scene]:
    settings = Settings(
        nats_url=nats_url, transaction_deadline_s=60, request_deadline_s=90, canary_timeout_s=60
    )
    recorder = Service(
        "recorder",
        str(Path(__file__).with_name("crashing_recorder.py")),
        nats_server,
        tmp_path / "recorder.log",
        TURBOSERVE_RECORDINGS_URL=f"file:{tmp_path}/recordings",
        TURBOSERVE_RECORDING_SEGMENT_S=str(SEGMENT_S),
        TURBOSERVE_RECORDING_POLL_S="0.1",
    )
    (tmp_path / "recordings").mkdir()
    async with state_store(settings), Harness.connected(settings) as api:
        yield Scene(api, recorder, tmp_path / "recordings")
        recorder.end()


async def test_every_step_of_writing(scene: Scene) -> None:
    """One recorder after the other dies at each step, while the session goes on."""
    session = await scene.record("rec_1")
    made = 0
    for point in WRITING:
        await scene.append(session, range(made, made + 4))
        made += 4
        if "init" in point:
            # The init segment is stored once only, so later processes would not pass these points.
            await scene.storage.delete("acme/rec_1/inits")
        # The second segment, where the first one shows that the point was passed alive.
        passed = 1 if point.endswith("a segment") else 0
        scene.recorder.start(CRASH=f"{point}:{passed}")
        await scene.append(session, range(made, made + 4))
        made += 4
        await scene.dead()
    scene.recorder.start()
    await scene.append(session, range(made, made + 2))
    await scene.api.end(session.id)
    row = await scene.until_state("rec_1", RecordingState.COMPLETE)
    assert (row.chunks, row.next_chunk, row.missing_chunks) == (made + 2, made + 2, 0)
    assert row.duration_s == pytest.approx((made + 2) * 0.75)
    assert row.expires_at is not None
    assert await check_stored(scene.storage, "acme/rec_1") == list(range(made + 2))


async def test_every_step_of_deletion(scene: Scene) -> None:
    ids = [f"rec_{number}" for number in range(len(DELETING))]
    sessions = [await scene.record(name) for name in ids]
    scene.recorder.start()
    for session in sessions:
        await scene.append(session, range(4))
        await scene.api.end(session.id)
    for name in ids:
        assert (await scene.until_state(name, RecordingState.COMPLETE)).chunks == 4
    scene.recorder.end()
    for name, point in zip(ids, DELETING, strict=True):
        ref = RecordingRef(recording=name, tenant="acme")
        await scene.api.bus.call(recording_subjects.DELETE_RECORDING, ref)
        with pytest.raises(NotFoundError):
            await scene.row(name)
        scene.recorder.start(CRASH=f"{point}:0")
        await scene.dead()
    scene.recorder.start()

    async def empty() -> bool:
        return await scene.storage.listing("acme") == []

    await eventually(empty, what=scene.recorder.logged)


async def test_a_stop_and_a_second_recording(scene: Scene) -> None:
    """Two recordings of one session, a pause of the recorder between them, and chunks of a foreign worker."""
    session = await scene.record("rec_1")
    scene.recorder.start()
    await scene.append(session, range(5))
    await asyncio.sleep(0)
    started = recording_subjects.START_RECORDING.request(session=session.id, recording="rec_2")
    assert (await scene.api.bus.call(recording_subjects.START_RECORDING, started)).id == "rec_1"

    async def counted() -> bool:
        return (await scene.api.get(session.id)).next_chunk == 5

    await eventually(counted)
    stop = recording_subjects.STOP_RECORDING.request(session=session.id)
    assert (await scene.api.bus.call(recording_subjects.STOP_RECORDING, stop)).until_chunk == 5
    assert (await scene.api.get(session.id)).recording is None
    assert (await scene.until_state("rec_1", RecordingState.COMPLETE)).chunks == 5
    await scene.append(session, range(5, 8))

    async def more() -> bool:
        return (await scene.api.get(session.id)).next_chunk == 8

    await eventually(more)
    assert (await scene.api.bus.call(recording_subjects.START_RECORDING, started)).from_chunk == 8
    assert (await scene.api.get(session.id)).recording == "rec_2"
    await scene.append(session, range(8, 10))
    await scene.api.end(session.id)
    row = await scene.until_state("rec_2", RecordingState.COMPLETE)
    assert (row.from_chunk, row.chunks) == (8, 2)
    assert await check_stored(scene.storage, "acme/rec_1") == list(range(5))
    assert await check_stored(scene.storage, "acme/rec_2") == [8, 9]
