"""One session: its prompts, its video, its events, its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import aconnect_sse

from turboserve.client.errors import (
    ControlSupersededError,
    GatewayUnreachableError,
    ProblemError,
    PromptSupersededError,
    SessionEndedError,
)
from turboserve.client.models import (
    Chunk,
    ChunkHistory,
    ControlReceipt,
    Decision,
    Event,
    Link,
    Migration,
    NewLink,
    Quality,
    Receipt,
    Role,
    SessionInfo,
    Ticket,
)
from turboserve.client.parameters import UNCHANGED, Unchanged, as_json
from turboserve.client.recording import AsyncRecording, RecordedFile, RecordingInfo, listed, write_video
from turboserve.client.stream import RECONNECT_WITHIN_S, VideoStream
from turboserve.client.transport import Transport, asked_wait_s, raise_for_problem, worth_repeating

_ENDED_STREAM = 204


class AsyncSession:
    """A session of one client. `info` is as the gateway last described it: no earlier answer replaces it."""

    def __init__(self, transport: Transport, session: str, info: SessionInfo | None = None) -> None:
        self.id = session
        self.info = info
        """None: not read yet."""
        self._transport = transport
        self._path = f"/v1/sessions/{session}"

    async def refresh(self) -> SessionInfo:
        """Read the session."""
        return self._described(await self._transport.request("GET", self._path))

    async def prompt(self, prompt: str, *, drop_buffer: bool = False) -> Receipt:
        """Change the prompt from the next chunk on. `applied` waits until the video shows it.

        `drop_buffer`: viewers discard the video that they have not shown, and skip to the first chunk that
        shows the prompt. Streams report that as `Skip`.
        """
        body = {"prompt": prompt} | ({"drop_buffer": True} if drop_buffer else {})
        answer = await self._transport.request("POST", f"{self._path}/prompts", json=body, idempotent=False)
        return Receipt.model_validate(answer)

    async def set_control(self, name: str, value: Any, *, drop_buffer: bool = False) -> ControlReceipt:
        """Set one of the model's controls from the next chunk on. `applied` waits until the video shows it.

        `value`: as its schema allows (`AsyncClient.models`). None: the model's own. `drop_buffer`: as for
        `prompt`.
        """
        body = {"name": name, "value": value} | ({"drop_buffer": True} if drop_buffer else {})
        answer = await self._transport.request("POST", f"{self._path}/controls", json=body, idempotent=False)
        return ControlReceipt.model_validate(answer)

    async def change(
        self,
        *,
        quality: Quality | Mapping[str, Any] | Unchanged | None = UNCHANGED,
        max_lead_s: float | Unchanged | None = UNCHANGED,
    ) -> SessionInfo:
        """Change limits of the session from the next chunk on. What is left out stays.

        Args:
            quality: Limits of the quality. None: the worker may lower it to its own floor.
            max_lead_s: Maximum seconds of video that are generated ahead of the playhead. With a short lead,
                a prompt is on screen sooner. None: the worker's own.
        """
        given = {"quality": as_json(quality), "max_lead_s": max_lead_s}
        body = {name: value for name, value in given.items() if not isinstance(value, Unchanged)}
        return self._described(await self._transport.request("PATCH", self._path, json=body))

    async def applied(self, receipt: Receipt | ControlReceipt, timeout_s: float | None = None) -> int:
        """Wait until a chunk shows the prompt or the control's value. Returns the index of the first one.

        Raises TimeoutError after `timeout_s`, SessionEndedError, and PromptSupersededError or
        ControlSupersededError if a later one took effect first. It takes a viewer: see `watch`."""
        async with asyncio.timeout(timeout_s):
            return await self._applied(receipt)

    async def _applied(self, receipt: Receipt | ControlReceipt) -> int:
        error: type[PromptSupersededError | ControlSupersededError]
        if isinstance(receipt, Receipt):
            kind, own, error = "prompt", receipt.prompt_id, PromptSupersededError
        else:
            kind, own, error = "control", receipt.control_id, ControlSupersededError
        async for event in self.events():
            if event.more.get(f"{kind}_id") == own:
                if event.type == f"{kind}.applied":
                    return int(event.more["chunk_index"])
                if event.type == f"{kind}.superseded":
                    raise error(own, str(event.more["superseded_by"]))
        info = await self.refresh()
        raise SessionEndedError(self.id, info.reason)

    async def pause(self) -> SessionInfo:
        """Stop generation, free the slot, keep the state. A repeat gets the same answer."""
        return self._described(await self._transport.request("POST", f"{self._path}/pause"))

    async def resume(self) -> SessionInfo:
        """Continue where the session stopped. A repeat gets the same answer."""
        return self._described(await self._transport.request("POST", f"{self._path}/resume"))

    async def end(self) -> SessionInfo:
        """End the session for good. A repeat gets the same answer."""
        return self._described(await self._transport.request("DELETE", self._path))

    async def migrate(self, worker: str | None = None) -> Migration:
        """Migrate the session to `worker`. None: the scheduler chooses. The video goes on."""
        answer = await self._transport.request("POST", f"{self._path}/migrate", json={"worker": worker})
        return Migration.model_validate(answer)

    async def decisions(self) -> list[Decision]:
        """List what the scheduler decided about the session, oldest first."""
        answer = await self._transport.request("GET", f"{self._path}/decisions")
        return [Decision.model_validate(each) for each in answer["decisions"]]

    async def chunk(self, index: int) -> ChunkHistory:
        """Read how chunk `index` came about, from the request to the screen. This does not count as watching.

        Raises `NotFoundError` if it is not generated yet, and `ChunkGoneError` if the log no longer keeps it.
        """
        return ChunkHistory.model_validate(
            await self._transport.request("GET", f"{self._path}/chunks/{index}")
        )

    async def ticket(self, role: Role | None = None) -> Ticket:
        """Create a ticket, for players that cannot set the header with the key. None: what the key allows."""
        body = {} if role is None else {"role": role}
        return Ticket.model_validate(
            await self._transport.request("POST", f"{self._path}/tickets", json=body)
        )

    async def share(
        self, role: Role = "viewer", *, expires_at: datetime | None = None, label: str = ""
    ) -> NewLink:
        """Create a link to the session. `expires_at` None: after the gateway's lifetime of links."""
        body: dict[str, Any] = {"role": role, "label": label}
        if expires_at is not None:
            body["expires_at"] = expires_at.isoformat()
        answer = await self._transport.request("POST", f"{self._path}/links", json=body, idempotent=False)
        return NewLink.model_validate(answer)

    async def links(self) -> list[Link]:
        """List the session's links that have not expired, newest first, without their tokens."""
        answer = await self._transport.request("GET", f"{self._path}/links")
        return [Link.model_validate(each) for each in answer["links"]]

    async def revoke_link(self, link: str) -> Link:
        """Revoke a link. Its streams end within a few seconds. A repeat gets the same answer."""
        return Link.model_validate(await self._transport.request("DELETE", f"{self._path}/links/{link}"))

    def watch(
        self,
        *,
        after: int | None = None,
        events_after: int | None = None,
        skip_lost: bool = False,
        keep_skipped: bool = False,
        reconnect_within_s: float = RECONNECT_WITHIN_S,
    ) -> VideoStream:
        """Return the session's video, to be entered with `async with`.

        Args:
            after: Index of the last chunk that the caller has; -1: from the beginning. None: from the
                playhead on.
            events_after: Number of the last event that the caller has; 0: all that are kept. None: new ones.
            skip_lost: Whether to continue behind chunks that are not kept any more.
            keep_skipped: Whether to give also the chunks that a prompt with `drop_buffer` lets viewers skip.
            reconnect_within_s: Time without a connection after which the stream gives up, seconds.
        """
        return VideoStream(
            self._transport.gateways,
            f"{self._path}/stream",
            self._transport.headers,
            after=after,
            events_after=events_after,
            skip_lost=skip_lost,
            keep_skipped=keep_skipped,
            reconnect_within_s=reconnect_within_s,
        )

    async def record(
        self,
        path: str | Path,
        seconds: float | None = None,
        *,
        after: int = -1,
        on_chunk: Callable[[Chunk], object] | None = None,
    ) -> RecordedFile:
        """Write the video to an MP4 file, chunk by chunk, also what viewers skip.

        Args:
            path: The file. It is playable at any moment, also after a crash.
            seconds: Least duration; whole chunks are written. None: until the session ends.
            after: Index of the chunk after which the recording begins; -1: from the first that is kept.
            on_chunk: Called after each written chunk, on the event loop.
        """
        if seconds is not None and seconds <= 0:
            raise ValueError(f"seconds: {seconds} must be above 0")
        stream = self.watch(after=after, skip_lost=after == -1, keep_skipped=True)
        return await write_video(stream, Path(path), seconds, on_chunk)

    async def start_recording(self) -> AsyncRecording:
        """Store the session's video at the server, from the next chunk on.

        A session that is recorded already returns its recording. `record` writes a local file instead.
        """
        return self._recorded(await self._transport.request("POST", f"{self._path}/recording"))

    async def stop_recording(self) -> AsyncRecording:
        """Stop recording. The session goes on. A repeat gets the same recording.

        Raises NotFoundError if the session was never recorded.
        """
        return self._recorded(await self._transport.request("DELETE", f"{self._path}/recording"))

    def recordings(self) -> AsyncIterator[AsyncRecording]:
        """List the session's recordings at the server, newest first."""
        return listed(self._transport, self.id)

    async def events(self, after: int = 0) -> AsyncIterator[Event]:
        """Follow the events after number `after`, until the session ends.

        Continues after broken connections, and after refusals that name a time to wait (429, 503). After as
        many failures in a row as the client has attempts, raises GatewayUnreachableError or the refusal.
        Raises other ProblemErrors at once.
        """
        failures = 0
        while True:
            gateway = self._transport.base_url
            try:
                async for event in self._connected_events(gateway, after):
                    after, failures = event.sequence, 0
                    yield event
                    if event.type == "session.ended":
                        return
                return
            except (httpx.TransportError, ProblemError) as error:
                failures += 1
                self._transport.gateways.leave(gateway)
                last = failures >= self._transport.attempts
                if isinstance(error, ProblemError) and (last or not worth_repeating(error)):
                    raise
                if last:
                    raise GatewayUnreachableError(f"{gateway}: {error}") from error
                await asyncio.sleep(max(asked_wait_s(error), min(3.0, 0.1 * 2**failures)))

    async def _connected_events(self, gateway: str, after: int) -> AsyncIterator[Event]:
        http = self._transport.http
        # Events may be far apart: the gateway's comments keep the connection alive.
        limits = httpx.Timeout(self._transport.timeout_s, read=60.0)
        async with aconnect_sse(
            http, "GET", f"{gateway}{self._path}/events", params={"after": after}, timeout=limits
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

    def _recorded(self, answer: object) -> AsyncRecording:
        info = RecordingInfo.model_validate(answer)
        return AsyncRecording(self._transport, info.id, info)

    def _described(self, answer: object) -> SessionInfo:
        found, known = SessionInfo.model_validate(answer), self.info
        newest = found.newest_event
        # Answers overtake each other.
        if known is None or newest is None or newest >= (known.newest_event or 0):
            self.info = found
        return found
