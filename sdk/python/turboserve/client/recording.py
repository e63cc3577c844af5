"""Recordings: files that the client writes from a stream, and videos that the server stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

import httpx
import tenacity
from pydantic import BaseModel, ConfigDict

from turboserve.client.errors import GatewayUnreachableError
from turboserve.client.models import Chunk, End
from turboserve.client.stream import VideoStream
from turboserve.client.transport import Transport, raise_for_problem, wait_s, worth_repeating

PAGE = 100


@dataclass(frozen=True)
class RecordedFile:
    """A file that the client has written from a stream."""

    path: Path
    chunks: int
    seconds: float
    """Duration of the video, seconds."""
    end: End | None = None
    """How the session ended. None: the video has the wanted duration."""


class RecordingInfo(BaseModel):
    """One recording, as the gateway last described it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    session: str
    model: str
    prompt: str
    """The session's prompt when the recording started."""
    state: Literal["recording", "stopping", "complete"] | str
    """A newer gateway may have further states."""
    from_chunk: int
    """Index of the first chunk of the recording."""
    chunks: int
    missing_chunks: int
    """Number of chunks that the log dropped before they were stored. The video has no gap there."""
    bytes: int
    duration_s: float
    parts: int
    """Number of videos. More than one: the encoder's settings changed."""
    reason: str | None
    """Why the recording stopped, if its user did not stop it."""
    session_failed: bool = False
    """Whether the recording ended because its session failed. `reason` is then the session's."""
    created_at: datetime
    updated_at: datetime
    completed_at: datetime | None
    expires_at: datetime | None
    """When the recording is deleted. None: it is not complete, or is kept until deleted."""


class AsyncRecording:
    """A recording that the server stores. `info` is as the gateway last described it."""

    def __init__(self, transport: Transport, recording: str, info: RecordingInfo | None = None) -> None:
        self.id = recording
        self.info = info
        """None: not read yet."""
        self._transport = transport
        self._path = f"/v1/recordings/{recording}"

    async def refresh(self) -> RecordingInfo:
        """Read what is stored so far. Raises NotFoundError."""
        self.info = RecordingInfo.model_validate(await self._transport.request("GET", self._path))
        return self.info

    async def complete(self, every_s: float = 0.5) -> RecordingInfo:
        """Wait until the recording does not change any more. `every_s`: how often it is read, seconds."""
        while (info := await self.refresh()).state != "complete":
            await asyncio.sleep(every_s)
        return info

    async def delete(self) -> None:
        """Delete the recording. A running one stops. Raises NotFoundError."""
        await self._transport.request("DELETE", self._path)

    async def download(
        self, path: str | Path, *, part: int = 1, on_bytes: Callable[[int, int], object] | None = None
    ) -> Path:
        """Write the video to an MP4 file, and go on after broken connections.

        Of a recording that still runs, the file has what was stored when the last request began.

        Args:
            path: The file. It is replaced.
            part: Which of the recording's `parts`, from 1.
            on_bytes: Called with the bytes that are written, and with those of the whole file.

        Raises NotFoundError while nothing is stored.
        """
        target = Path(path)
        transfer = _Download(self._transport, f"{self._path}/video.mp4", part, on_bytes)
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._transport.attempts),
            wait=wait_s,
            retry=tenacity.retry_if_exception(worth_repeating),
            reraise=True,
        )
        try:
            await retrying(transfer.into, target)
        except httpx.TransportError as error:
            raise GatewayUnreachableError(f"{self._transport.base_url}: {error}") from error
        return target


class _Download:
    """One file, over as many requests as it takes."""

    def __init__(
        self, transport: Transport, path: str, part: int, on_bytes: Callable[[int, int], object] | None
    ) -> None:
        self._transport, self._path, self._part = transport, path, part
        self._on_bytes = on_bytes or (lambda _done, _size: None)
        self._done = 0
        self._etag = ""

    async def into(self, target: Path) -> None:
        """Write what is missing. The file is opened once the gateway has answered."""
        # Of a file that has changed meanwhile, the gateway sends all.
        headers = {"Accept-Encoding": "identity"}
        if self._done:
            headers |= {"Range": f"bytes={self._done}-", "If-Range": self._etag}
        gateway = self._transport.base_url
        try:
            await self._from(f"{gateway}{self._path}", headers, target)
        except httpx.TransportError:
            self._transport.gateways.leave(gateway)
            raise

    async def _from(self, url: str, headers: Mapping[str, str], target: Path) -> None:
        http = self._transport.http
        async with http.stream("GET", url, params={"part": self._part}, headers=headers) as answer:
            if not answer.is_success:
                await answer.aread()
                raise_for_problem(answer)
            if answer.status_code != httpx.codes.PARTIAL_CONTENT:
                self._done = 0
            self._etag = answer.headers.get("ETag", "")
            size = self._done + int(answer.headers.get("Content-Length", 0))
            with await asyncio.to_thread(target.open, "r+b" if self._done else "wb") as file:
                file.seek(self._done)
                async for data in answer.aiter_bytes():
                    await asyncio.to_thread(_write, file, data)
                    self._done += len(data)
                    self._on_bytes(self._done, size)
                file.truncate()
            if self._done < size:
                raise httpx.RemoteProtocolError(f"{size - self._done} bytes are missing")


async def listed(transport: Transport, session: str | None) -> AsyncIterator[AsyncRecording]:
    """List recordings, newest first. `session`: only those of this session."""
    after: int | None = None
    while True:
        params: dict[str, Any] = {"limit": PAGE, "session": session, "after": after}
        given = {name: value for name, value in params.items() if value is not None}
        page = await transport.request("GET", "/v1/recordings", params=given)
        for each in page["recordings"]:
            info = RecordingInfo.model_validate(each)
            yield AsyncRecording(transport, info.id, info)
        after = page["next"]
        if after is None:
            return


async def write_video(
    stream: VideoStream,
    target: Path,
    seconds: float | None,
    on_chunk: Callable[[Chunk], object] | None,
) -> RecordedFile:
    """Write a stream's chunks to an MP4 file. See `AsyncSession.record`."""
    chunks, duration_s, init = 0, 0.0, b""
    # The file is opened once the gateway has answered: a refusal leaves an earlier recording as it is.
    async with stream:
        with await asyncio.to_thread(target.open, "wb") as file:
            async for chunk in stream:
                data = chunk.fragment if chunk.format.init == init else chunk.mp4
                init = chunk.format.init
                await asyncio.to_thread(_write, file, data)
                chunks, duration_s = chunks + 1, duration_s + chunk.duration_s
                if on_chunk is not None:
                    on_chunk(chunk)
                # A chunk's duration is a sum of floating point numbers.
                if seconds is not None and duration_s >= seconds - 1e-6:
                    break
    return RecordedFile(target, chunks, duration_s, stream.end)


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
