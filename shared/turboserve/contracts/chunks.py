"""A chunk on the wire: an init segment and one closed fMP4 fragment, described by headers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Self, TypeVar

from pydantic import Field, ValidationError

from turboserve.contracts.base import Contract, Count, Id, Text, UnixSeconds
from turboserve.contracts.errors import InvalidInputError

H = TypeVar("H", bound="ChunkHeader")

HEADER = "Ts-Chunk"
SIDE_LIMIT = 16_384
"""Pixels of a side of a video frame, at most."""
CODEC_PATTERN = r"^[A-Za-z0-9.,_-]{1,64}$"
"""RFC 6381, without what would end the quoted parameter of a media type."""

ChunkIndex = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Index of a chunk, a frame or a latent frame: enough for years of video, and exact in every reader's
arithmetic (Redis counts in floats and prints 14 digits)."""


class ChunkHeader(Contract):
    """Travels in the message's headers, so that readers who only count need not load the video.

    The payload is `init_bytes` of fMP4 init segment followed by one fragment. Every chunk carries the init
    segment (about 0.7 kB): a viewer can start anywhere and a change of encoder needs no message of its own.
    """

    session: Id
    index: ChunkIndex
    epoch: Count
    began: ChunkIndex | None = None
    """The first chunk of this epoch; None: made by an earlier version."""
    worker: Id
    control_seq: Count
    """Number of the newest control this chunk was made under."""
    first_frame: ChunkIndex
    """Index of the first video frame in the session's timeline."""
    frames: int = Field(ge=1, le=10_000)
    fps: float = Field(ge=0.01, le=1_000)
    width: int = Field(ge=1, le=SIDE_LIMIT)
    height: int = Field(ge=1, le=SIDE_LIMIT)
    codec: Text = Field(pattern=CODEC_PATTERN)
    """RFC 6381, for Media Source Extensions, e.g. `avc1.42c01e`."""
    init_bytes: Count
    compute_s: float = Field(default=0.0, ge=0)
    """Time from the chunk's first denoising step to its packaging, seconds."""
    published_at: UnixSeconds = 0.0

    @property
    def start_s(self) -> float:
        """Media time of the first frame, seconds."""
        return self.first_frame / self.fps

    @property
    def end_s(self) -> float:
        return (self.first_frame + self.frames) / self.fps

    def to_headers(self) -> dict[str, str]:
        return {HEADER: self.model_dump_json()}

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Self:
        header: Self = _read(cls, headers[HEADER])
        return header

    @classmethod
    def of_entry(cls, session: str, headers: Mapping[str, str], payload_bytes: int | None = None) -> Self:
        """The header of an entry in the log of `session`, which any worker may have written.

        `payload_bytes`: of its payload, if that is known. Raises InvalidInputError if it is no chunk of
        `session`.
        """
        if HEADER not in headers:
            raise InvalidInputError(f"there is no header {HEADER}", field=HEADER)
        try:
            header = cls.from_headers(headers)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or HEADER
            raise InvalidInputError(f"{field}: {first['msg']}", field=field) from None
        if header.session != session:
            raise InvalidInputError(
                f"session: {header.session}, not {session}", field="session", limit=session
            )
        if payload_bytes is not None and header.init_bytes >= payload_bytes:
            raise InvalidInputError(
                f"init_bytes: {header.init_bytes} of {payload_bytes}", field="init_bytes", limit=payload_bytes
            )
        return header


@functools.lru_cache(maxsize=512)
def _read(kind: type[H], text: str) -> H:
    """A gateway reads a chunk's header once for all viewers of the session: headers do not change."""
    return kind.model_validate_json(text)


class Ownership(Contract):
    """state store → stream CHUNKS, on `own.<session>`: the fence itself. Its sequence is what chunks name."""

    session: Id
    epoch: Count
    worker: Id | None = None


class LatentsHeader(Contract):
    """worker → state store: one chunk's clean latents follow as raw bytes, kept for the window's length.

    Kept only if `worker` owned the session at `epoch`, by the log.
    """

    session: Id
    index: ChunkIndex
    epoch: Count
    worker: Id | None = None
    """Who made them; None: kept by an earlier version."""
    began: ChunkIndex = 0
    """The first chunk of this epoch: from here to `index` all are of it..."""
    before: ChunkIndex = 0
    """...and the one before that is of this epoch; 0: there is none."""
    dtype: Text = Field(max_length=32)
    shape: tuple[ChunkIndex, ...] = Field(max_length=8)
    """[frames, channels, height, width]."""
    first_latent: ChunkIndex
    """Index of the first latent frame in the session's timeline."""
