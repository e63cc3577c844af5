"""A WebRTC viewer made with aiortc, which knows nothing of the gateway but WHEP."""

from __future__ import annotations

import asyncio
import hashlib
import json
from functools import cache
from typing import Any

import av
import httpx
from aiortc import MediaStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription

from tests.helpers.stream_protocol import check_sent

SDP = {"Content-Type": "application/sdp"}
PATIENCE_S = 60.0


def digest(frame: av.VideoFrame) -> str:
    """Return a digest of the frame's pixels, Y, U and V, as the decoder made them."""
    return hashlib.sha256(frame.to_ndarray(format="yuv420p").tobytes()).hexdigest()


async def offer_of(connection: RTCPeerConnection) -> str:
    """Let the connection make its offer, with all its candidates."""
    await connection.setLocalDescription(await connection.createOffer())
    return connection.localDescription.sdp


@cache
def an_offer() -> str:
    """Return an offer that any gateway answers, of a viewer that never connects."""

    async def make() -> str:
        connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        connection.addTransceiver("video", direction="recvonly")
        connection.createDataChannel("messages")
        text = await offer_of(connection)
        await connection.close()
        return text

    return asyncio.run(make())


class WhepViewer:
    """Watches one session, and keeps what it gets."""

    def __init__(self, api: httpx.AsyncClient, session: str, **more: Any) -> None:
        """`more`: of the POST, for example `headers` or `params`."""
        self.api, self.session, self._more = api, session, more
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.connection.addTransceiver("video", direction="recvonly")
        self.channel = self.connection.createDataChannel("messages")
        self.frames: list[tuple[int, str]] = []
        """RTP timestamp and digest of each decoded frame."""
        self.pictures: list[av.VideoFrame] = []
        self.messages: list[dict[str, Any]] = []
        self.location = ""
        self.answer: httpx.Response | None = None
        self._reading: asyncio.Task[None] | None = None
        self.connection.on("track", self._track)
        self.channel.on("message", self._message)

    async def __aenter__(self) -> WhepViewer:
        more = dict(self._more)
        headers = {**SDP, **more.pop("headers", {})}
        self.answer = answer = await self.api.post(
            f"/v1/sessions/{self.session}/whep",
            content=await offer_of(self.connection),
            headers=headers,
            **more,
        )
        assert answer.status_code == 201, answer.text
        assert answer.headers["content-type"].startswith("application/sdp")
        self.location = answer.headers["location"]
        await self.connection.setRemoteDescription(RTCSessionDescription(answer.text, "answer"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.close()
        if self._reading is not None:
            self._reading.cancel()

    def say(self, **message: Any) -> None:
        self.channel.send(json.dumps(message))

    async def until(self, type_: str, **having: Any) -> dict[str, Any]:
        """Return the first message of this type with these values."""
        seen = 0
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for message in self.messages[seen:]:
                    seen += 1
                    if message["type"] == type_ and having.items() <= message.items():
                        return message
                await asyncio.sleep(0.02)

    async def decoded(self, count: int) -> None:
        """Wait until `count` frames were decoded."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.frames) < count:
                await asyncio.sleep(0.02)

    async def closed(self, within_s: float) -> None:
        """Wait until the gateway has closed the connection."""
        async with asyncio.timeout(within_s):
            while self.connection.connectionState not in ("closed", "failed"):
                await asyncio.sleep(0.05)

    def _message(self, text: str) -> None:
        message = json.loads(text)
        check_sent(message)
        self.messages.append(message)

    def _track(self, track: MediaStreamTrack) -> None:
        self._reading = asyncio.ensure_future(self._read(track))

    async def _read(self, track: MediaStreamTrack) -> None:
        while True:
            frame = await track.recv()
            assert isinstance(frame, av.VideoFrame)
            assert frame.pts is not None
            self.frames.append((frame.pts, digest(frame)))
            self.pictures.append(frame)
