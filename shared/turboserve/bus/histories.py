"""The known owners of a session, oldest first, and the subjects to which each appended chunks."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from turboserve.contracts.chunks import ChunkHeader
from turboserve.subjects import CHUNK, CHUNK_UNNAMED, identity_of


@dataclass(frozen=True)
class Owned:
    """One entry of `own.<session>`."""

    sequence: int
    epoch: int
    worker: str | None

    @property
    def identity(self) -> str | None:
        return None if self.worker is None else identity_of(self.worker)


@dataclass
class History:
    """The known entries of `own.<session>`."""

    entries: list[Owned]
    """Oldest first."""
    unnamed_until: int
    """Sequence of the newest chunk from earlier versions, whose subject names no identity. 0: none."""
    current: bool = False
    """Whether the subject was read to its end, and no newer entry was announced since that reading began."""
    heard: bool = False
    """Whether a newer entry was announced."""

    def at(self, sequence: int) -> Owned | None:
        """Return the newest entry before stream `sequence`."""
        position = bisect_left(self.entries, sequence, key=lambda own: own.sequence)
        return self.entries[position - 1] if position else None

    def names(self, epoch: int, worker: str) -> bool:
        """Whether `worker` was the owner at `epoch`."""
        return any((own.epoch, own.worker) == (epoch, worker) for own in self.entries)

    def has_written(self, header: ChunkHeader, sequence: int) -> bool:
        """Whether the owner before stream `sequence` is the one that the chunk's header names."""
        own = self.at(sequence)
        if own is not None:
            return (own.epoch, own.worker) == (header.epoch, header.worker)
        # The stream keeps a limited number of entries per subject. A session with more owners than that has
        # unknown first owners. Their epochs are lower than the oldest known epoch.
        return bool(self.entries) and 1 <= header.epoch < self.entries[0].epoch

    @property
    def complete(self) -> bool:
        """Whether the log has at least one owner, and all owners that the session ever had."""
        return bool(self.entries) and self.entries[0].epoch <= 1

    @property
    def identities(self) -> set[str]:
        return {own.identity for own in self.entries if own.identity is not None}

    def stints(self) -> list[tuple[Owned, int | None]]:
        """Return each owner's entry, and the sequence of the next owner's entry (None for the newest)."""
        ends = [own.sequence for own in self.entries[1:]]
        return [(own, end) for own, end in zip(self.entries, [*ends, None], strict=True) if own.worker]

    def subjects(self, session: str, own: Owned) -> list[str]:
        """Return the subjects to which this owner appended, in the order of its chunks."""
        assert own.worker is not None
        unnamed = [CHUNK_UNNAMED.of(session)] if own.sequence < self.unnamed_until else []
        return [*unnamed, CHUNK.by(session, own.worker)]
