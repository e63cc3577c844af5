"""The client of recordings without `async`. See `turboserve.client.sync`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from anyio.from_thread import BlockingPortal

from turboserve.client.recording import AsyncRecording, RecordingInfo

T = TypeVar("T")


class Recording:
    """See `AsyncRecording`."""

    def __init__(self, portal: BlockingPortal, recording: AsyncRecording) -> None:
        self._portal, self._recording = portal, recording
        self.id = recording.id

    @property
    def info(self) -> RecordingInfo | None:
        """See `AsyncRecording.info`."""
        return self._recording.info

    def refresh(self) -> RecordingInfo:
        """See `AsyncRecording.refresh`."""
        return self._portal.call(self._recording.refresh)

    def complete(self, every_s: float = 0.5) -> RecordingInfo:
        """See `AsyncRecording.complete`."""
        return self._portal.call(self._recording.complete, every_s)

    def delete(self) -> None:
        """See `AsyncRecording.delete`."""
        self._portal.call(self._recording.delete)

    def download(
        self, path: str | Path, *, part: int = 1, on_bytes: Callable[[int, int], object] | None = None
    ) -> Path:
        """See `AsyncRecording.download`."""
        return self._portal.call(partial(self._recording.download, path, part=part, on_bytes=on_bytes))


def recordings_of(portal: BlockingPortal, found: AsyncIterator[AsyncRecording]) -> Iterator[Recording]:
    """Return the recordings of an asynchronous list, for code without `async`."""
    for each in iterated(portal, found):
        yield Recording(portal, each)


def iterated(portal: BlockingPortal, items: AsyncIterator[T]) -> Iterator[T]:
    """Return the items of an asynchronous iterator."""
    ended = object()

    async def following() -> T | object:
        return await anext(items, ended)

    while (item := portal.call(following)) is not ended:
        yield item  # type: ignore[misc]
