"""Metrics of streams by what their viewers receive."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

from turboserve.bench.report import percentile
from turboserve.simulation.player import Player
from turboserve.simulation.streams import StreamRecord

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95 % quantile of Student's distribution with 1, 2, 3, … degrees of freedom."""
_Z95 = 1.959964


class Interval(TypedDict):
    """A mean with its 95 % interval."""

    mean: float
    ci95: float | None
    """Half width. None: one value has no interval."""


@dataclass(frozen=True)
class StreamMetrics:
    """Figures of one run."""

    cpr: float
    """Mean over the streams of the share of chunks that are ready when the viewer needs them. A chunk that
    never comes is late."""
    cpr_no_buffer: float
    """The same for viewers that play from the first chunk on, which is in time by definition."""
    ttfc_mean_s: float
    """Time from the request to the first chunk, or to the end of the run if there is none."""
    ttfc_p95_s: float
    stalls_per_stream: float
    stall_s: float
    """Mean length of a stall, seconds; 0 without a stall."""
    quality: float
    """Mean quality of all chunks, relative to the best configuration."""
    least_quality: float
    """Least quality of any chunk."""
    incomplete: int
    """Number of streams whose last chunk did not come within the run."""


def measure(records: Sequence[StreamRecord], lasted_s: float) -> StreamMetrics:
    """Compute the figures of one run of `lasted_s` seconds. There is at least one stream."""
    first = [
        record.received[0].ready_s if record.received else max(0.0, lasted_s - record.plan.arrives_s)
        for record in records
    ]
    stalls = [stall for record in records for stall in record.stalls]
    qualities = [chunk.quality for record in records for chunk in record.received]
    return StreamMetrics(
        cpr=statistics.fmean(
            sum(chunk.in_time for chunk in record.received) / record.plan.chunks for record in records
        ),
        cpr_no_buffer=statistics.fmean(map(ready_share_without_buffer, records)),
        ttfc_mean_s=statistics.fmean(first),
        ttfc_p95_s=percentile(first, 0.95) or 0.0,
        stalls_per_stream=len(stalls) / len(records),
        stall_s=statistics.fmean(stalls) if stalls else 0.0,
        quality=statistics.fmean(qualities) if qualities else 1.0,
        least_quality=min(qualities, default=1.0),
        incomplete=sum(not record.complete for record in records),
    )


def cpr_bounds(records: Sequence[StreamRecord]) -> tuple[float, float]:
    """Return the least and the largest CPR that a run can still have, given what its streams have so far.

    Whether a chunk that has come was in time does not change any more. All others may be late or in time.
    """
    in_time = [sum(chunk.in_time for chunk in record.received) for record in records]
    open_ = [record.plan.chunks - len(record.received) for record in records]
    chunks = [record.plan.chunks for record in records]
    return (
        statistics.fmean(got / of for got, of in zip(in_time, chunks, strict=True)),
        statistics.fmean((got + left) / of for got, left, of in zip(in_time, open_, chunks, strict=True)),
    )


def ready_share_without_buffer(record: StreamRecord) -> float:
    """Return the share of chunks that a viewer needs and has, who plays from the first chunk on.

    After a switch it plays from the first chunk under the new prompt on.
    """
    if not record.received:
        return 0.0
    player = Player(record.received[0].ready_s, record.plan.pauses)
    switched, in_time = deque(record.switched), 0
    for chunk in record.received:
        while switched and switched[0] <= chunk.ready_s:
            player.drop_buffer(switched.popleft(), math.inf)
        in_time += player.receive(chunk.ready_s, chunk.end_s, chunk.skips)
    return in_time / record.plan.chunks


def interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95 % interval by Student's distribution."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "ci95": None}
    return {
        "mean": mean,
        "ci95": student95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)),
    }


def student95(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's distribution with that many degrees of freedom.

    Beyond the table, by the normal quantile's expansion (Abramowitz and Stegun, 26.7.5), within 0.001.
    """
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z, n = _Z95, freedom
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + first + second + third


def summarize(runs: Sequence[StreamMetrics]) -> dict[str, Interval]:
    """Return mean and interval of each figure over runs with different seeds."""
    rows = [asdict(run) for run in runs]
    return {name: interval([float(row[name]) for row in rows]) for name in rows[0]}
