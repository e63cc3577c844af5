"""The client's stream when a prompt drops the buffer: what it skips, and what it keeps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import eventually
from tests.sdk.scripted_gateway import Connection, Script, chunks, scripted, watch
from turboserve.client import (
    AsyncClient,
    Skip,
    video,
)
from turboserve.client.models import Chunk, Event


def plays_until_a_skip(first_taken: asyncio.Event | None = None) -> Script:
    """Chunk 4 is the first that shows a prompt with `drop_buffer`. The prompt comes after `first_taken`."""

    async def play(connection: Connection) -> None:
        await connection.begin(range(4))
        await connection.event(1)
        if first_taken is not None:
            await first_taken.wait()
        await connection.skip(4)
        await connection.chunk(4)
        await connection.chunk(5)
        await connection.end(5)

    return play


async def test_a_skip_discards_what_the_caller_has_not_taken_and_is_reported() -> None:
    """Incident: the message was ignored, and the caller got the old scene to its end."""
    first_taken = asyncio.Event()
    async with scripted(plays_until_a_skip(first_taken)) as gateway:
        stream = watch(gateway)
        async with stream:
            items = stream.items()
            first = await anext(items)
            first_taken.set()
            await eventually(lambda: stream.last_skip is not None)
            rest = [item async for item in items]
    assert isinstance(first, Chunk)
    assert first.index == 0
    event, skip, *chunks_after = rest
    assert isinstance(event, Event)
    assert skip == stream.last_skip == Skip(4, 4.0, 1, discarded=(1, 2, 3))
    assert [item.index for item in chunks_after if isinstance(item, Chunk)] == [4, 5]


async def test_after_a_skip_the_playhead_is_at_the_new_scene() -> None:
    async def play(connection: Connection) -> None:
        await connection.begin([0, 1])
        await first_taken.wait()
        await connection.skip(2)
        await connection.chunk(2)
        await connection.socket.wait_closed()

    first_taken = asyncio.Event()
    async with scripted(play) as gateway:
        stream = watch(gateway)
        async with stream:
            await anext(aiter(stream))
            first_taken.set()
            reports = gateway.connections[0].messages
            await eventually(lambda: any(each["playhead_s"] == 2.0 for each in reports))
            report = reports[-1]
    assert report == {"type": "playhead", "playhead_s": 2.0, "buffered_s": 1.0}


async def test_chunks_that_viewers_skip_are_kept_for_those_that_ask_and_in_recordings(tmp_path: Path) -> None:
    async with scripted(plays_until_a_skip()) as gateway:
        stream = watch(gateway, keep_skipped=True)
        assert await chunks(stream) == [0, 1, 2, 3, 4, 5]
        assert stream.last_skip == Skip(4, 4.0, 1)
        recording = await AsyncClient(gateway.url).session("ses_1").record(tmp_path / "all.mp4")
    assert recording.chunks == 6


async def test_a_connection_that_breaks_after_a_skip_goes_on_there() -> None:
    async def breaks(connection: Connection) -> None:
        await connection.begin([0, 1])
        await first_taken.wait()
        await connection.skip(2)
        await connection.chunk(2)
        await eventually(lambda: stream.last_skip is not None)
        await connection.vanish()

    async def goes_on(connection: Connection) -> None:
        after = int(connection.query["after"])
        await connection.begin(start=after + 1)
        for index in range(after + 1, 4):
            if index == 2:
                await connection.skip(2)
            await connection.chunk(index)
        await connection.end(3)

    first_taken = asyncio.Event()
    async with scripted(breaks, goes_on) as gateway:
        stream = watch(gateway)
        async with stream:
            items = stream.items()
            assert isinstance(await anext(items), Chunk)
            first_taken.set()
            await eventually(lambda: stream.last_skip is not None)
            found = [item.index for item in [item async for item in items] if isinstance(item, Chunk)]
    # Chunk 1 comes once more only if the connection broke before the caller took chunk 2.
    assert found in ([2, 3], [1, 2, 3])


async def test_paced_frames_go_over_to_the_new_scene_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(chunk: Chunk) -> list[video.Frame]:
        image: Any = None
        return [video.Frame(image, chunk.start_s + n / 10, chunk.index, chunk.control_seq) for n in range(10)]

    monkeypatch.setattr(video, "decode", decoded)
    shown_first = asyncio.Event()

    async def play(connection: Connection) -> None:
        await connection.begin([0, 1])
        await shown_first.wait()
        await connection.skip(2)
        await connection.chunk(2)
        await connection.end(2)

    async with scripted(play) as gateway:
        stream = watch(gateway)
        async with stream:
            shown = []
            async for frame in video.frames(stream, paced=True):
                shown.append(frame.chunk)
                shown_first.set()
    assert shown.count(2) == 10
    assert 1 <= shown.count(0) < 10
    assert 1 not in shown
