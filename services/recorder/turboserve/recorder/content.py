"""Serves what is stored: one item of a recording, any range of its bytes."""

from __future__ import annotations

import asyncio
import hashlib
import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cachetools import LRUCache

from turboserve.clock import Clock
from turboserve.contracts.errors import ConflictError, NotFoundError
from turboserve.contracts.recordings import ReadRecording, RecordingBytes
from turboserve.recorder import thumbnails
from turboserve.recorder.core.playlist import media_playlist
from turboserve.recorder.core.segments import INITS, Index, Part, Segment
from turboserve.recorder.core.video import segment_index, shift_ticks, shifted, timescale_of
from turboserve.recorder.storage import Storage, StorageError
from turboserve.recorder.writer import folder_of
from turboserve.subject_types import Caller
from turboserve.wording import counted

INDEXES = 1_000
OPEN_INDEX_S = 1.0
"""Time for which the index of a growing recording is kept, seconds."""
COMPLETE_INDEX_S = 60.0
VIDEO, JPEG, PLAYLIST = "video/mp4", "image/jpeg", "application/vnd.apple.mpegurl"
_SEGMENT = re.compile(r"segments/(\d{1,10})\.m4s")
_INIT = re.compile(r"inits/(\d{1,5})\.mp4")

Read = Callable[[int, int], Awaitable[bytes]]
"""Start and length → bytes."""


@dataclass(frozen=True)
class Item:
    """One item: its description, and how to read it."""

    size: int
    etag: str
    media_type: str
    read: Read


class Content:
    """Reads recordings. All methods may raise StorageError."""

    def __init__(self, storage: Storage, clock: Clock, cache_bytes: int, segment_s: float) -> None:
        self._storage, self._clock, self._segment_s = storage, clock, segment_s
        self._indexes: LRUCache[str, tuple[float, Index]] = LRUCache(INDEXES)
        self._cache: LRUCache[str, bytes] = LRUCache(cache_bytes, getsizeof=len)
        self._decoding = asyncio.Lock()
        """Thumbnails are made one at a time, since decoding competes with workers for the cores."""

    async def read(self, request: ReadRecording, _caller: Caller) -> tuple[RecordingBytes, bytes]:
        """Answer a request of the gateway, which has checked the tenant.

        Raises NotFoundError and ConflictError.
        """
        item = await self._item(request)
        if request.etag is not None and request.etag != item.etag:
            raise ConflictError(f"{request.item} has changed: read it again from its start", field="etag")
        length = max(0, min(request.length, item.size - request.start))
        data = await item.read(request.start, length) if length else b""
        return RecordingBytes(size=item.size, etag=item.etag, media_type=item.media_type), data

    async def _item(self, request: ReadRecording) -> Item:
        folder = folder_of(request.tenant, request.recording)
        index = await self._index(folder, request.complete)
        if not index.segments:
            raise NotFoundError(f"recording {request.recording} has no video yet", field="recording")
        name = request.item
        if name == "video.mp4":
            return await self._video(folder, _part(index, request.part), request.complete)
        if name == "playlist.m3u8":
            return _fixed(media_playlist(index, request.complete, self._segment_s).encode(), PLAYLIST)
        if name == "poster.jpg":
            return await self._picture(folder, "poster", [index.segments[0]], thumbnails.poster)
        if name == "contact-sheet.jpg":
            chosen = _spread(_part(index, request.part).segments, thumbnails.TILES)
            return await self._picture(folder, "sheet", chosen, thumbnails.contact_sheet)
        if found := _INIT.fullmatch(name):
            return _fixed(await self._init(folder, _part(index, int(found[1])).segments[0]), VIDEO)
        if found := _SEGMENT.fullmatch(name):
            for part in index.parts:
                for segment, start in zip(part.segments, part.starts, strict=True):
                    if segment.first == int(found[1]):
                        return _fixed(await self._segment(folder, segment, start), VIDEO)
        raise NotFoundError(f"recording {request.recording} has no {name}", field="item")

    async def _video(self, folder: str, part: Part, complete: bool) -> Item:
        """The whole part as one file. Its head has an index only when the file grows no more: until then,
        what clients have read stays where it is."""
        init = await self._init(folder, part.segments[0])
        head = init + (segment_index(part, timescale_of(init)) if complete else b"")
        offsets, at = [], len(head)
        for segment in part.segments:
            offsets.append(at)
            at += segment.size
        size = at

        async def read(start: int, length: int) -> bytes:
            found = head[start : start + length]
            while len(found) < length:
                position = start + len(found)
                number = bisect_right(offsets, position) - 1
                data = await self._segment(folder, part.segments[number], part.starts[number])
                begin = position - offsets[number]
                found += data[begin : begin + length - len(found)]
            return found

        return Item(size, _etag(folder, str(size), str(len(part.segments)), str(complete)), VIDEO, read)

    async def _picture(
        self, folder: str, kind: str, segments: list[Segment], make: Callable[[list[bytes]], bytes]
    ) -> Item:
        if not thumbnails.available():
            raise NotFoundError(
                "this recorder makes no pictures: no decoder is installed (extra `thumbnails`)", field="item"
            )
        etag = _etag(folder, kind, *(segment.name for segment in segments))
        data = self._cache.get(etag)
        if data is None:
            videos = []
            for segment in segments:
                videos.append(await self._init(folder, segment) + await self._segment(folder, segment, None))
            async with self._decoding:
                data = await asyncio.to_thread(make, videos)
            self._remember(etag, data)
        return _fixed(data, JPEG, etag)

    async def _index(self, folder: str, complete: bool) -> Index:
        now_s = self._clock.monotonic()
        key = f"{folder} {complete}"
        found = self._indexes.get(key)
        if found is None or now_s - found[0] > (COMPLETE_INDEX_S if complete else OPEN_INDEX_S):
            found = self._indexes[key] = now_s, Index.of(await self._storage.listing(folder))
        return found[1]

    async def _init(self, folder: str, segment: Segment) -> bytes:
        return await self._object(f"{folder}/{INITS}{segment.init}.mp4")

    async def _segment(self, folder: str, segment: Segment, start_frame: int | None) -> bytes:
        """Return a segment, shifted to where it begins in its video; None: as it is stored."""
        data = await self._object(f"{folder}/{segment.name}")
        if len(data) != segment.size:
            raise StorageError(f"{segment.name} has {len(data)} bytes", retry_after_s=1.0)
        if start_frame is None or start_frame == segment.first_frame:
            return data
        timescale = timescale_of(await self._init(folder, segment))
        return shifted(data, shift_ticks(segment, start_frame, timescale))

    async def _object(self, path: str) -> bytes:
        data: bytes | None = self._cache.get(path)
        if data is None:
            data = await self._storage.get(path)
            self._remember(path, data)
        return data

    def _remember(self, key: str, data: bytes) -> None:
        if len(data) <= self._cache.maxsize:
            self._cache[key] = data


def _part(index: Index, number: int) -> Part:
    if not 1 <= number <= len(index.parts):
        raise NotFoundError(
            f"part: the recording has {counted(len(index.parts), 'part')}, not {number}",
            field="part",
            limit=len(index.parts),
        )
    return index.parts[number - 1]


def _spread(segments: tuple[Segment, ...], count: int) -> list[Segment]:
    """Choose at most `count` segments, evenly."""
    chosen = min(count, len(segments))
    return [segments[number * len(segments) // chosen] for number in range(chosen)]


def _fixed(data: bytes, media_type: str, etag: str | None = None) -> Item:
    async def read(start: int, length: int) -> bytes:
        return data[start : start + length]

    return Item(len(data), etag or hashlib.sha256(data).hexdigest()[:32], media_type, read)


def _etag(*parts: str) -> str:
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:32]
