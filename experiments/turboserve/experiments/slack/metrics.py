"""Metrics of streams by what their viewers receive."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from turboserve.bench.report import percentile
from turboserve.simulation.player import Player
from turboserve.simulation.streams import StreamRecord

_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Two-sided 95 % quantile of Student's distribution by the number of values."""
_Z95 = 1.96


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


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and the half width of its 95 % interval (Student); 0 for one value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean, "ci95": 0.0}
    factor = _T95.get(len(values), _Z95)
    return {"mean": mean, "ci95": factor * statistics.stdev(values) / math.sqrt(len(values))}


def summarize(runs: Sequence[StreamMetrics]) -> dict[str, dict[str, float]]:
    """Return mean and interval of each figure over runs with different seeds."""
    rows = [asdict(run) for run in runs]
    return {name: interval([float(row[name]) for row in rows]) for name in rows[0]}
