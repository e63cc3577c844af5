"""The quality of a worker's chunks, as its reports and its chunks' headers carry it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from turboserve.contracts.fidelity import ChunkFidelity
from turboserve.contracts.workers import HeldSession
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_ladder import FidelityLadder

WINDOW_S = 60.0
"""Time over which a worker reports the quality of its chunks, seconds."""


def chunk_fidelity(fidelity: Fidelity | None, ladder: FidelityLadder) -> ChunkFidelity | None:
    """Return a chunk's configuration with its measured quality. None: the best configuration."""
    if fidelity is None:
        return None
    return ChunkFidelity(**asdict(fidelity), quality=ladder.quality(fidelity))


def fidelity_from(header: ChunkFidelity | None) -> Fidelity | None:
    """Return the configuration that a header names. None: the best."""
    return None if header is None else Fidelity(header.steps, header.window_chunks, header.sparsity)


def floor_seconds(seconds: Mapping[int, float], ladder: FidelityLadder) -> dict[int, float]:
    """Return L(b) at the fastest configuration above the ladder's floor. Empty: there is none below the best.

    `seconds`: L(b) at the best configuration.
    """
    lowest = ladder.lowest(None, pinned=False)
    share = ladder.rungs[lowest].forwards / ladder.best.forwards
    return {batch: share * value for batch, value in seconds.items()} if lowest else {}


@dataclass(frozen=True)
class _ChunkQuality:
    """What the last minute keeps of one chunk."""

    at_s: float
    quality: float | None
    lowered: bool


class QualityBoard:
    """The chunks of the last minute, and the newest one of each session. Belongs to the event loop."""

    def __init__(self) -> None:
        self._made: deque[_ChunkQuality] = deque()
        self._newest: dict[str, tuple[int, ChunkFidelity | None]] = {}

    def made(self, session: str, run: int, fidelity: ChunkFidelity | None, now: float) -> None:
        """Count a chunk that is packaged. `now`: monotonic seconds."""
        self._newest[session] = run, fidelity
        quality = 1.0 if fidelity is None else fidelity.quality
        self._made.append(_ChunkQuality(now, quality, fidelity is not None))
        self._drop(now)

    def forget(self, session: str) -> None:
        """Drop the newest chunk of a session that has left. Its chunks still count."""
        self._newest.pop(session, None)

    def mean(self, now: float) -> float | None:
        """Mean quality of the chunks of the last minute. None: no chunk, or one was not measured."""
        self._drop(now)
        known = [each.quality for each in self._made if each.quality is not None]
        return sum(known) / len(known) if self._made and len(known) == len(self._made) else None

    def debt(self, now: float) -> float:
        """Share of the chunks of the last minute that were below the best configuration."""
        self._drop(now)
        return sum(each.lowered for each in self._made) / len(self._made) if self._made else 0.0

    def onto(self, held: Iterable[HeldSession], runs: Mapping[str, int]) -> tuple[HeldSession, ...]:
        """Return the sessions with the configurations of their newest chunks, of these runs."""
        return tuple(self._with_fidelity(one, runs.get(one.session)) for one in held)

    def _with_fidelity(self, held: HeldSession, run: int | None) -> HeldSession:
        newest = self._newest.get(held.session)
        if newest is None or newest[0] != run or newest[1] is None:
            return held
        return held.model_copy(update={"fidelity": newest[1]})

    def _drop(self, now: float) -> None:
        while self._made and self._made[0].at_s <= now - WINDOW_S:
            self._made.popleft()
