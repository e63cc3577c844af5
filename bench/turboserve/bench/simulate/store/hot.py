"""What the state store keeps in memory and in the hot store: playheads, latents. All of it may be lost."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.sessions import SessionRecord

LATENTS_KEPT = 3
"""Newest chunks whose latents are kept."""


@dataclass(frozen=True)
class Latents:
    """Stands for one chunk's clean latents."""

    index: int
    epoch: int
    chain: int
    """See `engine.State`."""


class HotStore:
    """Redis: comes back empty now and then."""

    def __init__(self) -> None:
        self.latents: dict[str, dict[int, Latents]] = {}

    def lose(self) -> None:
        self.latents.clear()

    def keep(self, session: str, latents: Latents) -> None:
        """An earlier owner's late latents never replace those of the current one."""
        kept = self.latents.setdefault(session, {})
        before = kept.get(latents.index)
        if before is not None and before.epoch > latents.epoch:
            return
        kept[latents.index] = latents
        for old in [index for index in kept if index <= latents.index - LATENTS_KEPT]:
            del kept[old]

    def forget(self, session: str) -> None:
        self.latents.pop(session, None)


class Playheads:
    """What one life of the store has heard of playback."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}
        """Session → playhead, and when it was last watched (0: not heard)."""

    def report(self, session: str, playhead_s: float, viewers: int, now: float) -> None:
        watched_at = now if viewers else self._seen.get(session, (0.0, 0.0))[1]
        self._seen[session] = (playhead_s, watched_at)

    def heard(self, record: SessionRecord) -> SessionRecord:
        seen = self._seen.get(record.id)
        return record if seen is None else record.model_copy(update={"playhead_s": seen[0]})

    def onto(self, record: SessionRecord, wall: float) -> SessionRecord:
        """With the freshest playhead, and for how long nobody has watched."""
        seen = self._seen.get(record.id, (record.playhead_s, 0.0))
        unwatched_s = None if record.phase.ended else max(0.0, wall - max(seen[1], record.updated_at))
        return record.model_copy(update={"playhead_s": seen[0], "unwatched_s": unwatched_s})

    def known(self, session: str) -> float | None:
        seen = self._seen.get(session)
        return None if seen is None else seen[0]

    def watched_s(self, session: str, wall: float) -> float | None:
        seen = self._seen.get(session)
        return wall - seen[1] if seen is not None and seen[1] else None

    def forget(self, session: str) -> None:
        self._seen.pop(session, None)
