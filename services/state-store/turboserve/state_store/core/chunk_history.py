"""The chunks that workers made, as rows of the history: one row per worker and step. No I/O.

A row has text, to which another flush of the same step only appends: a line per flush and session, with the
session, the index of its first chunk, and the chunks. Of each chunk: when it was published, in milliseconds
after the step's begin, how long it was computed, in milliseconds, and a hexadecimal digit for the rest.

    ses_7/120/250:130:4;1010:128:4
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.fidelity import Tier
from turboserve.contracts.pool_history import ChunkBar, SessionLane
from turboserve.state_store.core.pool_history import step_of

TIERS = (None, Tier.URGENT, Tier.NORMAL, Tier.RELAXED)
"""Tiers by the upper two bits of a chunk's digit, the most urgent one first."""
LATE, LOWERED = 2, 1
SKEW_S = 60.0
"""Difference of the clocks of a worker and the store up to which the worker's time of a chunk counts."""
BACKLOG_S = 3_600.0
"""Age of a chunk up to which the worker's time counts: the store reads chunks later if it was away."""
COMPUTE_LIMIT_MS = 3_600_000


@dataclass(frozen=True)
class ChunkRow:
    """The chunks of one worker in the step that began at `at`, Unix seconds."""

    worker: str
    at: int
    chunks: int
    late: int
    lowered: int
    body: str


@dataclass(frozen=True)
class ChunkMark:
    """One chunk. Times are Unix seconds."""

    session: str
    index: int
    published_at: float
    compute_s: float
    late: bool
    lowered: bool
    tier: Tier | None


@dataclass
class _Step:
    late: int = 0
    lowered: int = 0
    runs: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """By session: index and text of each chunk, in the order of the log."""


def rows_of(chunks: Iterable[tuple[ChunkHeader, float]]) -> list[ChunkRow]:
    """Return the rows of chunks in the order of the log, by worker and step.

    The time beside each chunk's header is when it was read, Unix seconds.
    """
    steps: dict[tuple[str, int], _Step] = {}
    for header, now in chunks:
        known = now - BACKLOG_S <= header.published_at <= now + SKEW_S
        at = header.published_at if known else now
        began = step_of(at)
        late = header.slack_s is not None and header.slack_s < 0
        lowered = header.fidelity is not None
        digit = TIERS.index(header.tier) << 2 | late * LATE | lowered * LOWERED
        compute_ms = min(round(header.compute_s * 1_000), COMPUTE_LIMIT_MS)
        step = steps.setdefault((header.worker, began), _Step())
        step.late += late
        step.lowered += lowered
        text = f"{int((at - began) * 1_000)}:{compute_ms}:{digit:x}"
        step.runs.setdefault(header.session, []).append((header.index, text))
    return [
        ChunkRow(
            worker,
            at,
            sum(len(run) for run in step.runs.values()),
            step.late,
            step.lowered,
            "".join(_lines(session, run) for session, run in step.runs.items()),
        )
        for (worker, at), step in sorted(steps.items())
    ]


def _lines(session: str, run: list[tuple[int, str]]) -> str:
    lines: list[str] = []
    expected = -1
    for index, text in run:
        lines.append(f";{text}" if index == expected else f"\n{session}/{index}/{text}")
        expected = index + 1
    return "".join(lines)


def marks(row: ChunkRow) -> list[ChunkMark]:
    """Return the chunks of a row."""
    found = []
    for line in filter(None, row.body.split("\n")):
        session, first, texts = line.split("/")
        for offset, text in enumerate(texts.split(";")):
            after_ms, compute_ms, digit = text.split(":")
            bits = int(digit, 16)
            found.append(
                ChunkMark(
                    session,
                    int(first) + offset,
                    row.at + int(after_ms) / 1_000,
                    int(compute_ms) / 1_000,
                    bool(bits & LATE),
                    bool(bits & LOWERED),
                    TIERS[bits >> 2],
                )
            )
    return found


def lanes(found: Iterable[ChunkMark], step_s: int) -> list[SessionLane]:
    """Return the chunks of one worker by session, in the order of the first bars.

    `step_s` 0: one bar for each chunk. Else one bar for all chunks that were published in the same step.
    """
    by_session: dict[str, dict[tuple[int, int], list[ChunkMark]]] = {}
    for mark in sorted(found, key=lambda mark: (mark.published_at, mark.index)):
        # A chunk that was counted twice has the same index.
        place = (step_of(mark.published_at, step_s), 0) if step_s else (0, mark.index)
        by_session.setdefault(mark.session, {}).setdefault(place, []).append(mark)
    return [
        SessionLane(session=session, bars=tuple(_bar(group) for group in groups.values()))
        for session, groups in by_session.items()
    ]


def _bar(group: list[ChunkMark]) -> ChunkBar:
    tiers = [TIERS.index(mark.tier) for mark in group if mark.tier is not None]
    once = {mark.index: mark for mark in group}
    return ChunkBar(
        began_at=min(mark.published_at - mark.compute_s for mark in group),
        ended_at=group[-1].published_at,
        first=min(once),
        chunks=len(once),
        late=sum(mark.late for mark in once.values()),
        lowered=sum(mark.lowered for mark in once.values()),
        tier=TIERS[min(tiers)] if tiers else None,
    )
