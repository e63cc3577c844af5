"""A chunk on the wire: an init segment and one closed fMP4 fragment, described by headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from turboserve.contracts.base import Contract, Id, UnixSeconds

HEADER = "Ts-Chunk"


class ChunkHeader(Contract):
    """Travels in the message's headers, so that readers who only count need not load the video.

    The payload is `init_bytes` of fMP4 init segment followed by one fragment. Every chunk carries the init
    segment (about 0.7 kB): a viewer can start anywhere and a change of encoder needs no message of its own.
    """

    session: Id
    index: int
    epoch: int
    worker: Id
    control_seq: int
    """Number of the newest control this chunk was made under."""
    first_frame: int
    """Index of the first video frame in the session's timeline."""
    frames: int
    fps: float
    width: int
    height: int
    codec: str
    """RFC 6381, for Media Source Extensions, e.g. `avc1.42c01e`."""
    init_bytes: int
    compute_s: float = 0.0
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
        return cls.model_validate_json(headers[HEADER])


class Ownership(Contract):
    """state store → stream CHUNKS, on `own.<session>`: the fence itself. Its sequence is what chunks name."""

    session: Id
    epoch: int
    worker: Id | None = None


class LatentsHeader(Contract):
    """worker → state store: one chunk's clean latents follow as raw bytes, kept for the window's length."""

    session: Id
    index: int
    epoch: int
    began: int = 0
    """The first chunk of this epoch: from here to `index` all are of it..."""
    before: int = 0
    """...and the one before that is of this epoch; 0: there is none."""
    dtype: str
    shape: tuple[int, ...]
    """[frames, channels, height, width]."""
    first_latent: int
    """Index of the first latent frame in the session's timeline."""
