"""The history of pools: steps, sums over longer steps, and what is deleted. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turboserve.contracts.pool_history import SAMPLE_S, CostPoint, PastMigration, PoolPoint, PoolSample

LAST = ("ready", "starting", "draining", "target", "capacity")
"""Fields of a sample of which a step keeps the last value. It keeps the greatest value of all others."""
OWNING = ("place", "resume", "recover", "rebuild", "migrated", "stay")
"""Kinds of decisions that name the session's owner."""
ENDING = ("migrated", "stay", "release")
"""Kinds of decisions that end a migration."""
SLICE_S = 3_600
"""Length of what one transaction deletes, seconds."""


@dataclass(frozen=True)
class ChunkCount:
    """Chunks of a pool in the step that began at `at`, Unix seconds."""

    at: int
    chunks: int
    late: int
    lowered: int


def step_of(at: float, step_s: int = SAMPLE_S) -> int:
    """Return the begin of the step that has the Unix time `at`. Steps begin at multiples of `step_s`."""
    return math.floor(at / step_s) * step_s


def merged(before: PoolSample, after: PoolSample) -> PoolSample:
    """Return the sample of a step that has both."""
    values: dict[str, Any] = {}
    for name in PoolSample.model_fields:
        first, second = getattr(before, name), getattr(after, name)
        if name in LAST:
            values[name] = first if second is None else second
        else:
            known = [value for value in (first, second) if value is not None]
            values[name] = max(known, default=None)
    return PoolSample(**values)


def points(
    samples: Iterable[tuple[int, PoolSample]], counts: Iterable[ChunkCount], step_s: int
) -> tuple[PoolPoint, ...]:
    """Return the points of steps of `step_s`. `samples` are in the order of time.

    A step without a sample has no point, and its chunks are in none: nothing is known of its pool.
    """
    steps: dict[int, PoolSample] = {}
    for at, sample in samples:
        step = step_of(at, step_s)
        steps[step] = merged(steps[step], sample) if step in steps else sample
    sums: dict[int, tuple[int, int, int]] = {}
    for count in counts:
        step = step_of(count.at, step_s)
        chunks, late, lowered = sums.get(step, (0, 0, 0))
        sums[step] = chunks + count.chunks, late + count.late, lowered + count.lowered
    found = []
    for step, sample in sorted(steps.items()):
        chunks, late, lowered = sums.get(step, (0, 0, 0))
        found.append(PoolPoint(at=step, chunks=chunks, late=late, lowered=lowered, **dict(sample)))
    return tuple(found)


def cost_points(rows: Mapping[int, tuple[float, float]], step_s: int) -> tuple[CostPoint, ...]:
    """Sum GPU-seconds and money, by the minute in which they were counted, over steps of `step_s`."""
    sums: dict[int, tuple[float, float]] = {}
    for at, (gpu_seconds, money) in sorted(rows.items()):
        step = step_of(at, step_s)
        before = sums.get(step, (0.0, 0.0))
        sums[step] = before[0] + gpu_seconds, before[1] + money
    return tuple(CostPoint(at=at, gpu_seconds=gpu, money=money) for at, (gpu, money) in sorted(sums.items()))


def kept_from(now: float, retention_s: float, beyond: int | None) -> int:
    """Return the time before which rows are deleted, Unix seconds.

    `beyond` is the step of the newest row beyond the permitted number of rows; None: there is none. All rows
    of its step are deleted, so that what is left is within the number.
    """
    aged = math.ceil(now - retention_s)
    return aged if beyond is None else max(aged, beyond + 1)


def slices(oldest: int | None, kept: int) -> Iterator[int]:
    """Yield the times before which successive transactions delete, the last of which is `kept`."""
    if oldest is None or oldest >= kept:
        return
    yield from range(oldest + SLICE_S, kept, SLICE_S)
    yield kept


def past_migration(over: str | None, *, runs: bool, **fields: Any) -> PastMigration:
    """Return a migration with its outcome.

    `over` is the kind of the decision that ended it; None: there is none. `runs`: whether the session's row
    names it.
    """
    if over is None:
        outcome = "running" if runs else "ended"
    else:
        outcome = "committed" if over == "migrated" else "abandoned"
    return PastMigration.model_validate({**fields, "outcome": outcome})
