"""The same client without `async`: an event loop in a thread of its own does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from turboserve.client import video
from turboserve.client.client import DEFAULT_URL, AsyncClient
from turboserve.client.models import (
    Chunk,
    ChunkHistory,
    ControlReceipt,
    Decision,
    End,
    Event,
    Hello,
    Link,
    Migration,
    Model,
    NewLink,
    Phase,
    Quality,
    Receipt,
    Role,
    SessionInfo,
    Skip,
    Ticket,
    Worker,
)
from turboserve.client.parameters import UNCHANGED, Unchanged
from turboserve.client.recording import RecordedFile
from turboserve.client.session import AsyncSession
from turboserve.client.stream import RECONNECT_WITHIN_S, VideoStream
from turboserve.client.sync_recording import Recording, iterated, recordings_of


class Client:
    """A client of one deployment. Use it in a `with` block; see `AsyncClient` for the arguments."""

    def __init__(
        self,
        base_url: str | Sequence[str] = DEFAULT_URL,
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        attempts: int = 5,
    ) -> None:
        self._client = AsyncClient(base_url, key=key, timeout_s=timeout_s, attempts=attempts)
        self._starting: AbstractContextManager[BlockingPortal] = start_blocking_portal("asyncio")
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        self._portal = self._starting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._portal is not None:
            self._portal.call(self._client.close)
        self._starting.__exit__(kind, error, trace)
        self._portal = None

    @property
    def portal(self) -> BlockingPortal:
        """Where the calls run. Raises RuntimeError outside the `with` block."""
        if self._portal is None:
            raise RuntimeError("use the client in a `with` block")
        return self._portal

    def create(
        self,
        prompt: str,
        *,
        model: str | None = None,
        width: int | None = None,
        height: int | None = None,
        seed: int | None = None,
        metadata: Mapping[str, str] | None = None,
        quality: Quality | Mapping[str, Any] | None = None,
        max_lead_s: float | None = None,
        **more: Any,
    ) -> Session:
        """See `AsyncClient.create`."""
        more |= {"model": model, "width": width, "height": height, "seed": seed}

        async def create() -> AsyncSession:
            return await self._client.create(
                prompt,
                metadata=metadata,
                quality=quality,
                max_lead_s=max_lead_s,
                **more,
            )

        return Session(self.portal, self.portal.call(create))

    def session(self, session: str) -> Session:
        """See `AsyncClient.session`."""
        return Session(self.portal, self._client.session(session))

    def sessions(self, phases: Iterable[Phase] = ()) -> Iterator[Session]:
        """See `AsyncClient.sessions`."""
        for each in iterated(self.portal, self._client.sessions(phases)):
            yield Session(self.portal, each)

    def recording(self, recording: str) -> Recording:
        """See `AsyncClient.recording`."""
        return Recording(self.portal, self._client.recording(recording))

    def recordings(self, session: str | None = None) -> Iterator[Recording]:
        """See `AsyncClient.recordings`."""
        return recordings_of(self.portal, self._client.recordings(session))

    def models(self) -> list[Model]:
        """See `AsyncClient.models`."""
        return self.portal.call(self._client.models)

    def workers(self) -> list[Worker]:
        """See `AsyncClient.workers`."""
        return self.portal.call(self._client.workers)


class Session:
    """See `AsyncSession`."""

    def __init__(self, portal: BlockingPortal, session: AsyncSession) -> None:
        self._portal, self._session = portal, session
        self.id = session.id

    @property
    def info(self) -> SessionInfo | None:
        """See `AsyncSession.info`."""
        return self._session.info

    def refresh(self) -> SessionInfo:
        """See `AsyncSession.refresh`."""
        return self._portal.call(self._session.refresh)

    def prompt(self, prompt: str, *, drop_buffer: bool = False) -> Receipt:
        """See `AsyncSession.prompt`."""
        return self._portal.call(partial(self._session.prompt, prompt, drop_buffer=drop_buffer))

    def change(
        self,
        *,
        quality: Quality | Mapping[str, Any] | Unchanged | None = UNCHANGED,
        max_lead_s: float | Unchanged | None = UNCHANGED,
    ) -> SessionInfo:
        """See `AsyncSession.change`."""
        return self._portal.call(partial(self._session.change, quality=quality, max_lead_s=max_lead_s))

    def set_control(self, name: str, value: Any, *, drop_buffer: bool = False) -> ControlReceipt:
        """See `AsyncSession.set_control`."""
        return self._portal.call(partial(self._session.set_control, name, value, drop_buffer=drop_buffer))

    def applied(self, receipt: Receipt | ControlReceipt, timeout_s: float | None = None) -> int:
        """See `AsyncSession.applied`."""
        return self._portal.call(self._session.applied, receipt, timeout_s)

    def pause(self) -> SessionInfo:
        """See `AsyncSession.pause`."""
        return self._portal.call(self._session.pause)

    def resume(self) -> SessionInfo:
        """See `AsyncSession.resume`."""
        return self._portal.call(self._session.resume)

    def end(self) -> SessionInfo:
        """See `AsyncSession.end`."""
        return self._portal.call(self._session.end)

    def migrate(self, worker: str | None = None) -> Migration:
        """See `AsyncSession.migrate`."""
        return self._portal.call(self._session.migrate, worker)

    def decisions(self) -> list[Decision]:
        """See `AsyncSession.decisions`."""
        return self._portal.call(self._session.decisions)

    def chunk(self, index: int) -> ChunkHistory:
        """See `AsyncSession.chunk`."""
        return self._portal.call(self._session.chunk, index)

    def ticket(self, role: Role | None = None) -> Ticket:
        """See `AsyncSession.ticket`."""
        return self._portal.call(self._session.ticket, role)

    def share(self, role: Role = "viewer", *, expires_at: datetime | None = None, label: str = "") -> NewLink:
        """See `AsyncSession.share`."""
        return self._portal.call(partial(self._session.share, role, expires_at=expires_at, label=label))

    def links(self) -> list[Link]:
        """See `AsyncSession.links`."""
        return self._portal.call(self._session.links)

    def revoke_link(self, link: str) -> Link:
        """See `AsyncSession.revoke_link`."""
        return self._portal.call(self._session.revoke_link, link)

    def events(self, after: int = 0) -> Iterator[Event]:
        """See `AsyncSession.events`."""
        return iterated(self._portal, self._session.events(after))

    def record(
        self,
        path: str | Path,
        seconds: float | None = None,
        *,
        after: int = -1,
        on_chunk: Callable[[Chunk], object] | None = None,
    ) -> RecordedFile:
        """See `AsyncSession.record`."""

        async def record() -> RecordedFile:
            return await self._session.record(path, seconds, after=after, on_chunk=on_chunk)

        return self._portal.call(record)

    def start_recording(self) -> Recording:
        """See `AsyncSession.start_recording`."""
        return Recording(self._portal, self._portal.call(self._session.start_recording))

    def stop_recording(self) -> Recording:
        """See `AsyncSession.stop_recording`."""
        return Recording(self._portal, self._portal.call(self._session.stop_recording))

    def recordings(self) -> Iterator[Recording]:
        """See `AsyncSession.recordings`."""
        return recordings_of(self._portal, self._session.recordings())

    def watch(
        self,
        *,
        after: int | None = None,
        events_after: int | None = None,
        skip_lost: bool = False,
        keep_skipped: bool = False,
        reconnect_within_s: float = RECONNECT_WITHIN_S,
    ) -> Stream:
        """See `AsyncSession.watch`. To be entered with `with`."""
        stream = self._session.watch(
            after=after,
            events_after=events_after,
            skip_lost=skip_lost,
            keep_skipped=keep_skipped,
            reconnect_within_s=reconnect_within_s,
        )
        return Stream(self._portal, stream)


class Stream:
    """See `VideoStream`."""

    def __init__(self, portal: BlockingPortal, stream: VideoStream) -> None:
        self._portal, self._stream = portal, stream

    def __enter__(self) -> Self:
        self._portal.call(self._stream.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(self._stream.__aexit__, kind, error, trace)

    def __iter__(self) -> Iterator[Chunk]:
        return iterated(self._portal, aiter(self._stream))

    @property
    def hello(self) -> Hello | None:
        """See `VideoStream.hello`."""
        return self._stream.hello

    @property
    def end(self) -> End | None:
        """See `VideoStream.end`."""
        return self._stream.end

    @property
    def last_skip(self) -> Skip | None:
        """See `VideoStream.last_skip`."""
        return self._stream.last_skip

    def items(self) -> Iterator[Chunk | Event | Skip]:
        """See `VideoStream.items`."""
        return iterated(self._portal, self._stream.items())

    def frames(self, *, paced: bool = False) -> Iterator[video.Frame]:
        """See `video.frames`."""
        return iterated(self._portal, video.frames(self._stream, paced=paced))
