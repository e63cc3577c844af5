"""Headers of chunks, for tests that append chunks."""

from __future__ import annotations

from turboserve.contracts.chunks import ChunkHeader


def chunk_header(
    session: str, index: int, epoch: int, worker: str, *, began: int | None = None, control_seq: int = 0
) -> ChunkHeader:
    """Return the header of a chunk of 12 frames, 0.75 s, without an init segment."""
    return ChunkHeader(
        session=session,
        index=index,
        epoch=epoch,
        began=began,
        worker=worker,
        control_seq=control_seq,
        first_frame=12 * index,
        frames=12,
        fps=16.0,
        width=64,
        height=64,
        codec="avc1.42c01e",
        init_bytes=0,
    )
