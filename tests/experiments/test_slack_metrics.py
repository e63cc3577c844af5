"""Metrics of streams, by cases computed by hand."""

from __future__ import annotations

import pytest

from turboserve.experiments.slack.load import highest_rate
from turboserve.experiments.slack.metrics import interval, measure, student95
from turboserve.simulation.player import Player
from turboserve.simulation.streams import ReceivedChunk, StreamPlan, StreamRecord


def _record(
    ready_s: list[float], chunks: int, buffer_s: float, qualities: list[float] | None = None
) -> StreamRecord:
    """Return the record of a viewer whose chunks of 1 s become ready at these times."""
    player = Player(buffer_s)
    record = StreamRecord(StreamPlan(10.0, chunks), stalls=player.stalls)
    for number, at in enumerate(ready_s):
        in_time = player.receive(at, number + 1.0)
        quality = 1.0 if qualities is None else qualities[number]
        record.received.append(ReceivedChunk(at, number + 1.0, quality, in_time))
    return record


def test_figures_of_two_streams() -> None:
    # With a buffer of 4 s the chunks are due at 4, 5 and 6 s; the third is late by 1 s.
    first = _record([2.0, 4.0, 7.0], 3, 4.0, [1.0, 0.9, 0.8])
    # One of two chunks came.
    second = _record([3.0], 2, 4.0)
    found = measure([first, second], lasted_s=100.0)
    assert found.cpr == pytest.approx((2 / 3 + 1 / 2) / 2)
    # From the first chunk on, the chunks are due at 2, 3 and 5 s: the second and the third are late.
    assert found.cpr_no_buffer == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found.ttfc_mean_s == pytest.approx(2.5)
    assert found.ttfc_p95_s == pytest.approx(2.95)
    assert found.stalls_per_stream == pytest.approx(0.5)
    assert found.stall_s == pytest.approx(1.0)
    assert found.quality == pytest.approx((1.0 + 0.9 + 0.8 + 1.0) / 4)
    assert found.least_quality == pytest.approx(0.8)
    assert found.incomplete == 1


def test_a_stream_without_a_chunk_counts_as_late_and_waits_until_the_end() -> None:
    found = measure([StreamRecord(StreamPlan(10.0, 7))], lasted_s=100.0)
    assert (found.cpr, found.cpr_no_buffer, found.incomplete) == (0.0, 0.0, 1)
    assert found.ttfc_mean_s == pytest.approx(90.0)


def test_the_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["mean"] == pytest.approx(3.0)
    # 2.776 × 1.5811 / √5
    assert found["ci95"] == pytest.approx(1.9629, abs=1e-3)
    # One value has no interval.
    assert interval([2.0]) == {"mean": 2.0, "ci95": None}


@pytest.mark.parametrize(
    ("freedom", "wanted"), [(1, 12.706), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000)]
)
def test_students_quantile_beyond_its_table(freedom: int, wanted: float) -> None:
    assert student95(freedom) == pytest.approx(wanted, abs=0.001)


@pytest.mark.parametrize("limit", [0.41, 0.9, 1.7, 3.59])
def test_bisection_finds_the_highest_rate(limit: float) -> None:
    found = highest_rate(lambda rate: rate <= limit)
    assert found is not None
    assert limit - 0.05 <= found <= limit


def test_bisection_at_its_ends() -> None:
    assert highest_rate(lambda rate: False) is None
    assert highest_rate(lambda rate: True) == 3.6
