"""Reads of stored recordings: one MP4 with any range, segments, playlist, pictures."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import av
import httpx
import pytest
from obstore.store import LocalStore, MemoryStore
from pydantic import SecretStr, ValidationError

from tests.helpers.ports import free_ports
from tests.recorder.conftest import FPS, FRAMES, Encoder, shade
from turboserve.clock import SystemClock
from turboserve.contracts.errors import ConflictError, NotFoundError
from turboserve.contracts.recordings import ReadRecording, RecordingBytes
from turboserve.recorder.content import Content
from turboserve.recorder.core.batching import Batch, SegmentLimits
from turboserve.recorder.core.segments import init_name
from turboserve.recorder.settings import Settings
from turboserve.recorder.storage import Storage, StorageError, open_store
from turboserve.subject_types import Caller

FOLDER = "acme/rec_1"
LIMITS = SegmentLimits(seconds=1.5, bytes=2**20, age_s=10.0)


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that speaks S3."""
    [port] = free_ports(1)
    log = (tmp_path_factory.mktemp("s3") / "log").open("wb")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, "MOTO_CALL_RESET_API": "false"}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.put(f"{url}/recordings", timeout=60).raise_for_status()
                break
            except httpx.TransportError:
                assert process.poll() is None, Path(log.name).read_text()
                sleep(0.2)
        else:
            pytest.fail(f"the server does not answer: {Path(log.name).read_text()}")
        yield url
    finally:
        process.kill()
        process.wait()
        log.close()


@pytest.fixture(params=["memory", "file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "memory":
        return Storage(MemoryStore(), 30.0)
    if request.param == "file":
        return Storage(open_store(Settings(recordings_url=f"file:{tmp_path}/recordings")), 30.0)
    settings = Settings(
        recordings_url=f"s3://recordings/{tmp_path.name}",
        recordings_s3_endpoint=request.getfixturevalue("s3_endpoint"),
        recordings_s3_access_key_id=SecretStr("key"),
        recordings_s3_secret_access_key=SecretStr("secret"),
    )
    return Storage(open_store(settings), 60.0)


async def test_storage_puts_lists_and_deletes(storage: Storage) -> None:
    assert await storage.listing(FOLDER) == []
    for name, data in (("segments/a", b"one"), ("segments/a", b"again"), ("inits/b", b"two")):
        await storage.put(f"{FOLDER}/{name}", data)
    await storage.put("acme/rec_11/segments/c", b"another recording")
    assert sorted(await storage.listing(FOLDER)) == [("inits/b", 3), ("segments/a", 5)]
    assert await storage.get(f"{FOLDER}/segments/a") == b"again"
    with pytest.raises(NotFoundError):
        await storage.get(f"{FOLDER}/segments/b")
    assert await storage.delete(FOLDER) == 2
    assert await storage.delete(FOLDER) == 0
    assert await storage.listing("acme/rec_11") == [("segments/c", 17)]
    assert storage.failing is None


async def test_storage_that_fails_says_why(tmp_path: Path) -> None:
    storage = Storage(LocalStore(tmp_path), 30.0)
    (tmp_path / "acme").write_text("a file in place of a folder")
    with pytest.raises(StorageError) as refused:
        await storage.put(f"{FOLDER}/segments/a", b"x")
    assert refused.value.retryable
    assert storage.failing == refused.value.detail
    (tmp_path / "acme").unlink()
    await storage.put(f"{FOLDER}/segments/a", b"x")
    assert storage.failing is None


@pytest.mark.parametrize("url", ["ftp://host/x", "s3:///prefix", "file://host/folder", "recordings", "file:"])
def test_an_address_without_storage_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="recordings_url"):
        Settings(recordings_url=url)


class Recording:
    """A stored recording, read as the gateway reads it."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.content = Content(storage, SystemClock(), 2**20, LIMITS.seconds)

    async def store(self, encoder: Encoder, indexes: list[int]) -> None:
        batch = Batch(indexes[0], LIMITS)
        whole = []
        for index in indexes:
            if index > batch.next_chunk:
                whole += batch.skip_to(index)
            whole += batch.add(encoder.chunk(index), 0.0)
        for new in [*whole, *batch.take()]:
            await self.storage.put(f"{FOLDER}/{init_name(new.init)}", new.init)
            await self.storage.put(f"{FOLDER}/{new.segment.name}", new.data)

    async def read(
        self, item: str, start: int = 0, length: int = 2**18, **more: object
    ) -> tuple[RecordingBytes, bytes]:
        values = {"complete": True, **more}
        request = ReadRecording.model_validate(
            {"recording": "rec_1", "tenant": "acme", "item": item, "start": start, "length": length, **values}
        )
        return await self.content.read(request, Caller("gateway"))


@pytest.fixture
def recording() -> Recording:
    return Recording(Storage(MemoryStore(), 30.0))


def frames_of(video: bytes) -> list[tuple[float, int]]:
    """Decode: time and nearest known shade of each frame."""
    found = []
    with av.open(io.BytesIO(video), "r") as container:
        for frame in container.decode(video=0):
            found.append((float(frame.time or 0.0), int(frame.to_ndarray(format="gray8").mean())))
    return found


def check_video(video: bytes, indexes: list[int]) -> None:
    """The video has exactly these chunks, one frame after the other."""
    frames = frames_of(video)
    expected = [index * FRAMES + number for index in indexes for number in range(FRAMES)]
    assert len(frames) == len(expected)
    for number, ((time, brightness), frame) in enumerate(zip(frames, expected, strict=True)):
        assert time == pytest.approx(number / FPS, abs=1e-4)
        assert abs(brightness - shade(frame)) <= 4, f"frame {number}"


@pytest.mark.parametrize("complete", [True, False])
async def test_one_video_without_gaps(recording: Recording, encoder: Encoder, complete: bool) -> None:
    """The recording begins in the middle of the session, and the log has lost chunks 9 and 10."""
    indexes = [4, 5, 6, 7, 8, 11, 12, 13]
    await recording.store(encoder, indexes)
    described, video = await recording.read("video.mp4", complete=complete)
    assert described.size == len(video)
    assert described.media_type == "video/mp4"
    check_video(video, indexes)
    if complete:
        with av.open(io.BytesIO(video), "r") as container:
            assert container.duration == pytest.approx(len(indexes) * FRAMES / FPS * av.time_base, rel=1e-3)


async def test_any_range_is_the_same_bytes(recording: Recording, encoder: Encoder) -> None:
    await recording.store(encoder, [3, 4, 5, 6, 7])
    described, video = await recording.read("video.mp4")
    for start in [*range(0, len(video), 977), len(video) - 1, len(video), len(video) + 5]:
        for length in (1, 500, 4_000):
            again, data = await recording.read("video.mp4", start, length, etag=described.etag)
            assert again == described
            assert data == video[start : start + length]
    nothing, data = await recording.read("video.mp4", length=0)
    assert (nothing, data) == (described, b"")


async def test_what_was_read_of_a_growing_recording_stays(recording: Recording, encoder: Encoder) -> None:
    await recording.store(encoder, [0, 1, 2])
    first, before = await recording.read("video.mp4", complete=False)
    await recording.store(encoder, [3, 4])
    recording.content._indexes.clear()
    _, after = await recording.read("video.mp4", complete=False)
    assert after.startswith(before)
    assert len(after) > len(before)
    with pytest.raises(ConflictError):
        await recording.read("video.mp4", complete=False, etag=first.etag)


async def test_the_playlists_pieces_are_the_video(recording: Recording, encoder: Encoder) -> None:
    await recording.store(encoder, [2, 3, 4, 5, 9])
    _, text = await recording.read("playlist.m3u8")
    lines = text.decode().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert names == ["segments/2.m4s", "segments/4.m4s", "segments/9.m4s"]
    assert lines[-1] == "#EXT-X-ENDLIST"
    pieces = [(await recording.read(name))[1] for name in ("inits/1.mp4", *names)]
    check_video(b"".join(pieces), [2, 3, 4, 5, 9])


async def test_another_encoding_begins_another_part(recording: Recording, encoder: Encoder) -> None:
    await recording.store(encoder, [0, 1])
    await recording.store(Encoder(side=96), [2, 3])
    _, first = await recording.read("video.mp4")
    _, second = await recording.read("video.mp4", part=2)
    check_video(first, [0, 1])
    check_video(second, [2, 3])
    with pytest.raises(NotFoundError, match="2 parts, not 3") as missing:
        await recording.read("video.mp4", part=3)
    assert (missing.value.field, missing.value.limit) == ("part", 2)


async def test_pictures(recording: Recording, encoder: Encoder) -> None:
    await recording.store(encoder, list(range(11)))
    described, poster = await recording.read("poster.jpg")
    assert described.media_type == "image/jpeg"
    [(_, brightness)] = frames_of(poster)
    assert abs(brightness - shade(0)) <= 6
    _, sheet = await recording.read("contact-sheet.jpg")
    with av.open(io.BytesIO(sheet), "r") as container:
        picture = next(container.decode(video=0)).to_ndarray(format="gray8")
    # Six segments of two chunks: two rows of four, the last two places empty.
    assert picture.shape == (320, 640)
    for number in range(6):
        row, column = divmod(number, 4)
        tile = picture[row * 160 + 40 : row * 160 + 120, column * 160 + 40 : column * 160 + 120]
        assert abs(int(tile.mean()) - shade(number * 2 * FRAMES)) <= 6, number


async def test_what_is_not_there(recording: Recording, encoder: Encoder) -> None:
    with pytest.raises(NotFoundError, match="no video yet"):
        await recording.read("video.mp4", complete=False)
    await recording.store(encoder, [0])
    for item in ("segments/1.m4s", "inits/2.mp4", "index.html"):
        with pytest.raises(NotFoundError):
            await recording.read(item, complete=False)


async def test_a_torn_object_is_not_part_of_the_video(recording: Recording, encoder: Encoder) -> None:
    await recording.store(encoder, [0, 1, 2, 3])
    torn = max(name for name, _ in await recording.storage.listing(FOLDER) if name.startswith("segments/"))
    await recording.storage.put(f"{FOLDER}/{torn}", b"half")
    _, video = await recording.read("video.mp4")
    check_video(video, [0, 1])
