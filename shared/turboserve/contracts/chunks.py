"""A chunk on the wire: an init segment and one closed fMP4 fragment, described by headers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Self, TypeVar

from pydantic import Field, ValidationError

from turboserve.contracts.base import Contract, Count, Id, Text, UnixSeconds
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.fidelity import ChunkFidelity, SlackSeconds, Tier
from turboserve.contracts.versions import MEMBER, SchemaVersionError

H = TypeVar("H", bound="ChunkHeader")

HEADER = "Ts-Chunk"
SIDE_LIMIT = 16_384
"""Maximum width and height of a video frame, pixels."""
CODEC_PATTERN = r"^[A-Za-z0-9.,_-]{1,64}$"
"""Codec by RFC 6381, without characters that would end the quoted parameter of a media type."""

ChunkIndex = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Index of a chunk, a frame or a latent frame. The limit allows years of video and keeps the index exact in
every reader's arithmetic (Redis counts in floats and prints 14 digits)."""

HEADERS_KEPT = 2_048
"""Newest headers that a process keeps parsed, about 2 kB each. The state store reads chunks a second late."""

StageAge = Annotated[float, Field(ge=0, le=1e9)]


class ChunkStages(Contract):
    """When a chunk passed the stages at its worker: ages at `published_at`, seconds.

    The worker's monotonic clock measures them. A stage that is older has the larger age.
    """

    due_s: StageAge
    """Age of the time at which the session was allowed to generate the chunk."""
    started_s: StageAge
    """Age of its first forward's gathering."""
    denoised_s: StageAge
    """Age of its clean latents."""
    decoded_s: StageAge
    """Age of its frames."""
    packaged_s: StageAge
    """Age of its video."""


class ChunkHeader(Contract):
    """Describes a chunk. Sent in the message's headers, so that a reader need not load the video.

    The payload is `init_bytes` of fMP4 init segment followed by one fragment. Every chunk carries the init
    segment (about 0.7 kB), so that a viewer can start at any chunk and a change of encoder needs no separate
    message.
    """

    session: Id
    index: ChunkIndex
    epoch: Count
    began: ChunkIndex | None = None
    """Index of the first chunk of this epoch. None: the chunk comes from an earlier version."""
    contiguous_from: ChunkIndex = 0
    """The log has lost no chunk from this index to this chunk. It lost the chunk before: the broker came back
    without the end of its log. 0: it has lost none."""
    worker: Id
    control_seq: Count
    """Number of the newest prompt or control that was in effect for this chunk."""
    first_frame: ChunkIndex
    """Index of the first video frame in the session's timeline."""
    frames: int = Field(ge=1, le=10_000)
    fps: float = Field(ge=0.01, le=1_000)
    width: int = Field(ge=1, le=SIDE_LIMIT)
    height: int = Field(ge=1, le=SIDE_LIMIT)
    codec: str = Field(pattern=CODEC_PATTERN)
    """Codec by RFC 6381, for Media Source Extensions, e.g. `avc1.42c01e`."""
    init_bytes: Count
    compute_s: float = Field(default=0.0, ge=0)
    """Time from the chunk's first denoising step to its packaging, seconds."""
    fidelity: ChunkFidelity | None = None
    """Configuration of the chunk. None: the best."""
    drops_buffer: bool = False
    """Whether viewers discard the video that they have, and skip to this chunk: the client asked for that
    with the prompt that the chunk is the first to show."""
    slack_s: SlackSeconds | None = None
    """Playout slack when the chunk was published, without the chunk. None: not known."""
    credit_s: SlackSeconds | None = None
    tier: Tier | None = None
    """Tier of the session when the chunk was published."""
    published_at: UnixSeconds = 0.0
    stages: ChunkStages | None = None
    """None: the chunk comes from an earlier version."""

    @property
    def start_s(self) -> float:
        """Media time of the first frame, seconds."""
        return self.first_frame / self.fps

    @property
    def end_s(self) -> float:
        return (self.first_frame + self.frames) / self.fps

    def to_headers(self) -> dict[str, str]:
        return {HEADER: self.to_text()}

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> Self:
        header: Self = _read(cls, headers[HEADER])
        return header

    @classmethod
    def of_entry(cls, session: str, headers: Mapping[str, str], payload_bytes: int | None = None) -> Self:
        """Read the header of an entry in the log of `session`, which any worker may have written.

        `payload_bytes` is the size of the payload; None: unknown. Raises InvalidInputError if the entry is
        not a chunk of `session`.
        """
        if HEADER not in headers:
            raise InvalidInputError(f"there is no header {HEADER}", field=HEADER)
        try:
            header = cls.from_headers(headers)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or HEADER
            raise InvalidInputError(f"{field}: {first['msg']}", field=field) from None
        except SchemaVersionError as error:
            # A newer owner's chunk cannot be here: its fence, by the state store, would stop the reader.
            raise InvalidInputError(str(error), field=MEMBER) from None
        if header.session != session:
            raise InvalidInputError(
                f"session: {header.session}, not {session}", field="session", limit=session
            )
        if payload_bytes is not None and header.init_bytes >= payload_bytes:
            raise InvalidInputError(
                f"init_bytes: {header.init_bytes} of {payload_bytes}", field="init_bytes", limit=payload_bytes
            )
        return header


@functools.lru_cache(maxsize=HEADERS_KEPT)
def _read(kind: type[H], text: str) -> H:
    """Parse a header. The cache lets a gateway parse each header once for all viewers of the session."""
    return kind.from_text(text)


class Ownership(Contract):
    """state store → stream CHUNKS, on `own.<session>`: the fence. An append of a chunk names its sequence."""

    session: Id
    epoch: Count
    worker: Id | None = None


class LatentsHeader(Contract):
    """worker → state store: one chunk's clean latents, with the raw bytes as body.

    The state store keeps them for the length of the window, and only if `worker` owned the session at `epoch`
    by the log.
    """

    session: Id
    index: ChunkIndex
    epoch: Count
    worker: Id | None = None
    """The worker that generated the latents. None: an earlier version stored them."""
    began: ChunkIndex = 0
    """Index of the first chunk of this epoch. All chunks from `began` to `index` are of this epoch."""
    before: ChunkIndex = 0
    """Epoch of the chunk before `began`. 0: there is none."""
    dtype: Text = Field(max_length=32)
    shape: tuple[ChunkIndex, ...] = Field(max_length=8)
    """Shape of the latents: [frames, channels, height, width]."""
    first_latent: ChunkIndex
    """Index of the first latent frame in the session's timeline."""
    fidelity: ChunkFidelity | None = None
    """Configuration of the chunk, with which a rebuild repeats its clean pass. None: the best."""
