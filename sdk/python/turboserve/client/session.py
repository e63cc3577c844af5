"""One session: its prompts, its video, its events, its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from httpx_sse import aconnect_sse

from turboserve.client.errors import GatewayUnreachableError, PromptSupersededError, SessionEndedError
from turboserve.client.models import Chunk, Decision, Event, Migration, Receipt, SessionInfo
from turboserve.client.stream import RECONNECT_WITHIN_S, VideoStream
from turboserve.client.transport import raise_for_problem

if TYPE_CHECKING:
    from turboserve.client.client import AsyncClient

_ENDED_STREAM = 204


@dataclass(frozen=True)
class Recording:
    """A finished recording."""

    path: Path
    chunks: int
    seconds: float
    """Duration of the video, seconds."""


class AsyncSession:
    """A session of one client. `info` is as the gateway last described it."""

    def __init__(self, client: AsyncClient, session: str, info: SessionInfo | None = None) -> None:
        self.id = session
        self.info = info
        """None: not read yet."""
        self._client = client
        self._path = f"/v1/sessions/{session}"

    async def refresh(self) -> SessionInfo:
        """Read the session."""
        return self._described(await self._client.transport.request("GET", self._path))

    async def prompt(self, prompt: str) -> Receipt:
        """Change the prompt from the next chunk on. `applied` waits until the video shows it."""
        answer = await self._client.transport.request(
            "POST", f"{self._path}/prompts", json={"prompt": prompt}, idempotent=False
        )
        return Receipt.model_validate(answer)

    async def applied(self, receipt: Receipt) -> int:
        """Wait until a chunk shows the prompt. Returns the index of the first such chunk.

        Raises PromptSupersededError if a later prompt took effect first, SessionEndedError.
        """
        async for event in self.events():
            if event.more.get("prompt_id") == receipt.prompt_id:
                if event.type == "prompt.applied":
                    return int(event.more["chunk_index"])
                if event.type == "prompt.superseded":
                    raise PromptSupersededError(receipt.prompt_id, str(event.more["superseded_by"]))
        info = await self.refresh()
        raise SessionEndedError(self.id, info.reason)

    async def pause(self) -> SessionInfo:
        """Stop generation, free the slot, keep the state. A repeat gets the same answer."""
        return self._described(await self._client.transport.request("POST", f"{self._path}/pause"))

    async def resume(self) -> SessionInfo:
        """Continue where the session stopped. A repeat gets the same answer."""
        return self._described(await self._client.transport.request("POST", f"{self._path}/resume"))

    async def end(self) -> SessionInfo:
        """End the session for good. A repeat gets the same answer."""
        return self._described(await self._client.transport.request("DELETE", self._path))

    async def migrate(self, worker: str | None = None) -> Migration:
        """Migrate the session to `worker`. None: the scheduler chooses. The video goes on."""
        answer = await self._client.transport.request(
            "POST", f"{self._path}/migrate", json={"worker": worker}
        )
        return Migration.model_validate(answer)

    async def decisions(self) -> list[Decision]:
        """List what the scheduler decided about the session, oldest first."""
        answer = await self._client.transport.request("GET", f"{self._path}/decisions")
        return [Decision.model_validate(each) for each in answer["decisions"]]

    def watch(
        self,
        *,
        after: int | None = None,
        events_after: int | None = None,
        skip_lost: bool = False,
        reconnect_within_s: float = RECONNECT_WITHIN_S,
    ) -> VideoStream:
        """Return the session's video, to be entered with `async with`.

        Args:
            after: Index of the last chunk that the caller has; -1: from the beginning. None: from the
                playhead on.
            events_after: Number of the last event that the caller has; 0: all that are kept. None: new ones.
            skip_lost: Whether to continue behind chunks that are not kept any more.
            reconnect_within_s: Time without a connection after which the stream gives up, seconds.
        """
        return VideoStream(
            f"{self._client.stream_url}{self._path}/stream",
            self._client.headers,
            after=after,
            events_after=events_after,
            skip_lost=skip_lost,
            reconnect_within_s=reconnect_within_s,
        )

    async def record(
        self,
        path: str | Path,
        seconds: float | None = None,
        *,
        after: int = -1,
        on_chunk: Callable[[Chunk], object] | None = None,
    ) -> Recording:
        """Write the video to an MP4 file, chunk by chunk.

        Args:
            path: The file. It is playable at any moment, also after a crash.
            seconds: Least duration; whole chunks are written. None: until the session ends.
            after: Index of the chunk after which the recording begins; -1: from the first that is kept.
            on_chunk: Called after each written chunk, on the event loop.
        """
        target = Path(path)
        chunks, duration_s, init = 0, 0.0, b""
        if seconds is not None and seconds <= 0:
            raise ValueError(f"seconds: {seconds} must be above 0")
        # The file is opened once the gateway has answered: a refusal leaves an earlier recording as it is.
        async with self.watch(after=after, skip_lost=after == -1) as stream:
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
        return Recording(target, chunks, duration_s)

    async def events(self, after: int = 0) -> AsyncIterator[Event]:
        """Follow the events after number `after`, until the session ends. Goes on after broken connections.

        Raises ProblemError, and GatewayUnreachableError after as many failures in a row as the client has
        attempts.
        """
        failures = 0
        while True:
            try:
                async for event in self._connected_events(after):
                    after, failures = event.sequence, 0
                    yield event
                    if event.type == "session.ended":
                        return
                return
            except httpx.TransportError as error:
                failures += 1
                if failures >= self._client.transport.attempts:
                    raise GatewayUnreachableError(f"{self._client.base_url}: {error}") from error
                await asyncio.sleep(min(3.0, 0.1 * 2**failures))

    async def _connected_events(self, after: int) -> AsyncIterator[Event]:
        http = self._client.transport.http
        # Events may be far apart: the gateway's comments keep the connection alive.
        limits = httpx.Timeout(self._client.timeout_s, read=60.0)
        async with aconnect_sse(
            http, "GET", f"{self._path}/events", params={"after": after}, timeout=limits
        ) as source:
            if not source.response.is_success:
                await source.response.aread()
                raise_for_problem(source.response)
            if source.response.status_code == _ENDED_STREAM:
                return
            async for message in source.aiter_sse():
                if not message.data:
                    # Only sets the time after which browsers reconnect.
                    continue
                yield Event.model_validate_json(message.data)
        raise httpx.RemoteProtocolError("the stream of events ended before the session")

    def _described(self, answer: object) -> SessionInfo:
        self.info = SessionInfo.model_validate(answer)
        return self.info


def _write(file: BufferedWriter, data: bytes) -> None:
    file.write(data)
    file.flush()
