"""Workers as processes that lend each other their devices: the log and the owner do not notice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.worker.worker_scene import Chunk, Scene, environment, pool, scene, store
from turboserve.bus import next_entry
from turboserve.contracts.workers import Playhead
from turboserve.subjects import CHUNK, CHUNKS, PLAYHEAD

__all__ = ["environment", "pool", "scene", "store"]

# The first test waits until torch, Postgres and the state store have started.
pytestmark = pytest.mark.timeout(900)

LOANS = "turboserve_worker_loans_begun_total"
ACTIVE = "turboserve_worker_loans_active"


async def kept(scene: Scene, session: str) -> list[Chunk]:
    """The chunks that the log keeps. A fast machine makes more than those before the loan begins."""
    found: list[Chunk] = []
    sequence = 1
    while (entry := await next_entry(scene.bus, CHUNKS, CHUNK.of(session), sequence)) is not None:
        found.append(Chunk.of(entry))
        sequence = entry.sequence + 1
    return found


@pytest.fixture
def host() -> Iterator[Path]:
    """A folder with a short name: the path of a Unix socket has at most 107 bytes."""
    with TemporaryDirectory(prefix="ts") as folder:
        yield Path(folder) / "host"


async def test_a_session_borrows_and_keeps_its_owner_when_the_donor_dies(scene: Scene, host: Path) -> None:
    shared = {
        "TURBOSERVE_SEQUENCE_PARALLEL_DIRECTORY": str(host),
        # The donor has no session that must outlast this, and its death is noticed at once.
        "TURBOSERVE_SEQUENCE_PARALLEL_TIMEOUT_S": "60",
    }
    home, donor = await scene.worker(**shared), await scene.worker(**shared)
    session = await scene.started(home)
    await scene.chunks(session, 1)

    async def behind(count: int) -> int:
        """The viewer is at the end of the video, until `count` more chunks are in the log."""
        last = (await scene.newest(session)).header
        goal = last.index + count

        async def reached() -> bool:
            newest = (await scene.newest(session)).header
            watched = Playhead(session=session, playhead_s=newest.end_s, viewers=1)
            await scene.bus.publish(PLAYHEAD, session, watched)
            return newest.index >= goal

        await scene.until(reached, "the session does not go on")
        return goal

    async def lent() -> bool:
        await behind(1)
        return scene.metric(home, LOANS) > 0

    await scene.until(lent, "no loan")

    async def reported() -> bool:
        await behind(1)
        parts = [
            scene.metric(worker, ACTIVE, role) for worker, role in ((home, '"home"'), (donor, '"donor"'))
        ]
        return parts == [1.0, 1.0]

    await scene.until(reported, "the two do not report the loan")
    scene.signal(donor, signal.SIGKILL)
    end = await behind(5)
    chunks = await kept(scene, session)
    indices = [chunk.header.index for chunk in chunks]
    assert indices == list(range(indices[0], indices[0] + len(indices)))
    assert indices[-1] >= end
    # One owner and one epoch, no gap and no repetition.
    assert {(chunk.header.worker, chunk.header.epoch) for chunk in chunks} == {(home, chunks[0].header.epoch)}
