"""A toyworld session is recorded on the whole stack, while the recorder is killed."""

from __future__ import annotations

import asyncio
import io
import json
import os

import av
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.asyncio.client import connect

from tests.helpers.waiting import eventually
from turboserve.cli.stack.background import BackgroundStack

CHUNKS = 12
KILLED_AT = (5, 9)
"""Numbers of chunks after which the recorder is killed."""
LIMIT_S = 120


async def test_a_killed_recorder_loses_and_repeats_nothing(stack: BackgroundStack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=LIMIT_S) as api:
        made = await api.post("/v1/sessions", json={"prompt": "a red circle moving left", "record": True})
        session = made.json()
        shown = b""
        stream = f"{stack.url.replace('http', 'ws', 1)}{session['links']['stream']}"
        async with connect(stream, max_size=None, open_timeout=LIMIT_S) as socket:
            chunks, killed = 0, list[int]()
            while chunks < CHUNKS:
                message = json.loads(await socket.recv(decode=True))
                if message["type"] not in ("init", "chunk"):
                    continue
                data = await socket.recv()
                assert isinstance(data, bytes)
                shown = data if message["type"] == "init" else shown + data
                if message["type"] == "chunk":
                    chunks += 1
                    if chunks in KILLED_AT:
                        if killed:
                            # On a busy machine it may not have been started again yet.
                            await asyncio.to_thread(stack.wait_until_back, "recorder", killed[-1], LIMIT_S)
                        killed.append(stack.kill("recorder"))
                    report = {"type": "playhead", "playhead_s": message["start_s"], "buffered_s": 0.5}
                    await socket.send(json.dumps(report))
        await api.delete(session["links"]["self"])
        await asyncio.to_thread(stack.wait_until_back, "recorder", killed[-1], LIMIT_S)
        path = f"/v1/recordings/{session['recording']}"

        async def complete() -> bool:
            return bool((await api.get(path)).json()["state"] == "complete")

        await eventually(complete)
        recording = (await api.get(path)).json()
        assert recording["chunks"] >= CHUNKS
        assert recording["missing_chunks"] == 0
        row = (await api.get(session["links"]["self"])).json()
        assert row["next_chunk"] == recording["chunks"]

        video = (await api.get(f"{path}/video.mp4")).content
        half = await api.get(f"{path}/video.mp4", headers={"Range": f"bytes={len(video) // 2}-"})
        assert (half.status_code, half.content) == (206, video[len(video) // 2 :])
        frames, length_s = decoded(video)
        assert length_s == pytest.approx(recording["duration_s"], abs=0.01)
        # What a viewer saw is the beginning of the recording, frame by frame.
        seen, _ = decoded(shown)
        assert len(seen) <= len(frames)
        assert all(np.array_equal(mine, recorded) for mine, recorded in zip(seen, frames, strict=False))

        assert fragments(stack, recording["id"])
        assert (await api.delete(path)).status_code == 204
        await eventually(lambda: not fragments(stack, recording["id"]))


def fragments(stack: BackgroundStack, recording: str) -> list[str]:
    """Return the names of a recording's files of video, also while folders are being removed."""
    folder = stack.data / "recordings" / "default" / recording
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith(".m4s")]


def decoded(video: bytes) -> tuple[list[NDArray[np.uint8]], float]:
    """Return the frames, each right after the one before, and the video's length in seconds."""
    with av.open(io.BytesIO(video), "r") as container:
        frames = list(container.decode(video=0))
        rate = container.streams.video[0].average_rate
    assert rate is not None
    times = [float(frame.time or 0.0) for frame in frames]
    assert times == pytest.approx([number / float(rate) for number in range(len(times))], abs=1e-3)
    pictures = [np.asarray(frame.to_ndarray(format="gray8"), dtype=np.uint8) for frame in frames]
    return pictures, len(frames) / float(rate)
