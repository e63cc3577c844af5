"""A viewer over WebRTC, as an external client: when the first pixels of each chunk were decoded."""

from __future__ import annotations

import asyncio
import json
import time
from types import TracebackType
from typing import Any, Self

import httpx
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from turboserve.bench.streaming.problems import ProblemError, json_of
from turboserve.tasks import stop


class WhepViewer:
    """Watches one session, and decodes what it gets. Times are monotonic seconds."""

    def __init__(self, api: httpx.AsyncClient, session: str) -> None:
        self._api, self._session = api, session
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._first_pts: int | None = None
        self._reading: asyncio.Task[None] | None = None
        self.frames: list[tuple[int, float]] = []
        """RTP time since the first frame, and when it was decoded, of each frame."""
        self.chunks: dict[int, int] = {}
        """Index → RTP time of the chunk's first frame since the first frame."""
        self.applied: dict[str, int] = {}
        """Prompt id → index of the first chunk that shows it."""

    async def __aenter__(self) -> Self:
        """Raises ProblemError if the gateway refuses."""
        self._connection.addTransceiver("video", direction="recvonly")
        self._connection.createDataChannel("messages").on("message", self._message)
        self._connection.on("track", self._track)
        await self._connection.setLocalDescription(await self._connection.createOffer())
        answer = await self._api.post(
            f"/v1/sessions/{self._session}/whep",
            content=self._connection.localDescription.sdp,
            headers={"Content-Type": "application/sdp"},
        )
        if answer.is_error:
            raise ProblemError(answer.status_code, json_of(answer.content))
        await self._connection.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.close()
        if self._reading is not None:
            await stop(self._reading)

    def seen_s(self, prompt_id: str) -> float | None:
        """Return when the first frame of the first chunk under the prompt was decoded; None: not yet."""
        rtp_time = self.chunks.get(self.applied.get(prompt_id, -1))
        if rtp_time is None:
            return None
        return next((at_s for time_of, at_s in self.frames if time_of >= rtp_time), None)

    def _message(self, text: str) -> None:
        message: dict[str, Any] = json.loads(text)
        if message["type"] == "chunk":
            self.chunks[message["index"]] = message["rtp_time"]
        elif message["type"] == "prompt.applied":
            self.applied[message["prompt_id"]] = message["chunk_index"]

    def _track(self, track: MediaStreamTrack) -> None:
        self._reading = asyncio.create_task(self._read(track))

    async def _read(self, track: MediaStreamTrack) -> None:
        while True:
            frame: Any = await track.recv()
            if self._first_pts is None:
                self._first_pts = frame.pts
            self.frames.append((frame.pts - self._first_pts, time.monotonic()))
