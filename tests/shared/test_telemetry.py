"""Gauges over a process's state: read when metrics are requested, without keeping it alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from turboserve.telemetry import Gauge


class Pool:
    def __init__(self, size: int | None) -> None:
        self.size = size


@pytest.fixture
def reader() -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    yield reader
    reader.shutdown()


def values(reader: InMemoryMetricReader) -> list[float]:
    data = reader.get_metrics_data()
    if data is None:
        return []
    return [
        point.value  # type: ignore[union-attr]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    ]


def test_a_gauge_has_the_newest_value_of_a_source_while_the_source_exists(
    reader: InMemoryMetricReader,
) -> None:
    meter = MeterProvider([reader]).get_meter("test")
    gauge: Gauge[Pool] = Gauge(meter, "pool_size", lambda pool: pool.size)
    assert values(reader) == []
    pool = Pool(None)
    gauge.add(pool)
    assert values(reader) == []
    pool.size = 3
    assert values(reader) == [3]
    pool.size = 4
    assert values(reader) == [4]
    del pool
    gc.collect()
    assert values(reader) == []
