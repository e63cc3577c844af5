"""Names of metrics, spans and attributes; gauges over a process's state; exemplars over OTLP."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.helpers import forked_process
from tests.helpers.otlp_receiver import DECLARED, OtlpReceiver, conventional_attributes
from turboserve.instruments import Instruments, ObservedGauge
from turboserve.telemetry_names import ATTRIBUTES, TelemetryNameError, is_own_attribute, is_span

WALK = """
import importlib, json, pkgutil, sys
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))
created = set()

def noting(create):
    def note(self, name, *arguments, **options):
        created.add((self._instrumentation_scope.name, name))
        return create(self, name, *arguments, **options)
    return note

meter = type(metrics.get_meter("x"))
for method in vars(meter).copy():
    if method.startswith("create_"):
        setattr(meter, method, noting(getattr(meter, method)))
import turboserve
for module in pkgutil.walk_packages(turboserve.__path__, "turboserve."):
    # Scripts of Alembic and `__main__` only run as such.
    if module.name.startswith(("turboserve.bench", "turboserve.cli")) or ".migrations" in module.name:
        continue
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            # Of the extras, some are not installed.
            if (error.name or "").startswith("turboserve"):
                raise
json.dump(sorted(name for scope, name in created if scope.startswith("turboserve.")), sys.stdout)
"""
"""Imports all modules of the services, and prints the metrics that OpenTelemetry was asked for."""

RECORD = """
import sys
from opentelemetry import metrics, trace
from turboserve import telemetry
from turboserve.config import Settings
from turboserve.telemetry_names import PERIODIC

telemetry.setup("test", Settings(otlp_endpoint=sys.argv[1]))
tracer = telemetry.tracer("test")
histogram = metrics.get_meter("turboserve.test").create_histogram("test.duration", unit="s")
with tracer.start_as_current_span("exported") as span:
    histogram.record(0.25)
    print(f"{span.get_span_context().trace_id:032x} {span.get_span_context().span_id:016x}")
with tracer.start_as_current_span("not exported", attributes={PERIODIC: True}):
    histogram.record(7.0)
histogram.record(70.0)
trace.get_tracer_provider().shutdown()
metrics.get_meter_provider().shutdown()
"""
"""Records one value within an exported span, one within another span, and one outside of any."""


ZEROS = """
from turboserve import telemetry
from turboserve.config import Settings
from turboserve.gateway import metrics

telemetry.setup("test", Settings())
print(telemetry.prometheus_text().decode())
"""


def test_counters_without_attributes_are_exported_before_they_count(tmp_path: Path) -> None:
    """Otherwise Prometheus sees no increase with the first event."""
    text = run(tmp_path, ZEROS)
    values = {line.split("{")[0].split(" ")[0]: line.split(" ")[-1] for line in text.splitlines()}
    assert values["turboserve_gateway_stalls_total"] == "0.0"
    assert "turboserve_gateway_keys_refused_total" not in values


class Pool:
    def __init__(self, size: int | None) -> None:
        self.size = size


def run(folder: Path, script: str, *arguments: str) -> str:
    """Return the output of a process of its own: OpenTelemetry takes one provider per process."""
    file = folder / "script.py"
    file.write_text(script)
    done = forked_process.run([str(file), *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    gauge = ObservedGauge(MeterProvider([reader]).get_meter("test"), "pool.size", "1", "")
    assert values(reader) == []
    pool = Pool(None)
    gauge.add(pool, lambda pool: pool.size)
    assert values(reader) == []
    pool.size = 3
    assert values(reader) == [3]
    pool.size = 4
    assert values(reader) == [4]
    del pool
    gc.collect()
    assert values(reader) == []


def test_a_source_that_changes_while_it_is_read_is_read_again(reader: InMemoryMetricReader) -> None:
    """Incident: an exporter's thread met a dictionary that grew, and the export lacked the gauge."""
    gauge = ObservedGauge(MeterProvider([reader]).get_meter("test"), "pool.size", "1", "")
    pool, members, grows = Pool(None), {"a": 1.0}, [{"b": 2.0}, {"c": 4.0}]

    def total(_: Pool) -> float:
        found = 0.0
        for size in members.values():
            # As another thread does.
            members.update(grows.pop() if grows else {})
            found += size
        return found

    gauge.add(pool, total)
    assert values(reader) == [7.0]


def test_conditions_are_exported_over_otlp_as_numbers(reader: InMemoryMetricReader) -> None:
    meter = MeterProvider([reader]).get_meter("test")
    gauge = ObservedGauge(meter, "pool.condition", "1", "", "condition")
    pool = Pool(3)
    gauge.add(pool, lambda pool: {"full": pool.size == 3, "empty": pool.size == 0})
    data = reader.get_metrics_data()
    assert data is not None
    # The exporter refuses all metrics of an export for one value that it does not take.
    [scope] = encode_metrics(data).resource_metrics[0].scope_metrics
    points = scope.metrics[0].gauge.data_points
    assert {point.attributes[0].value.string_value: point.as_double for point in points} == {
        "full": 1.0,
        "empty": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("turboserve_worker_chunks", "{chunk}"),
        ("turboserve.worker", "{chunk}"),
        ("turboserve.store.chunks", "{chunk}"),
        ("worker.chunks", "{chunk}"),
        ("turboserve.worker.Chunks", "{chunk}"),
        ("turboserve.worker.chunks_", "{chunk}"),
        ("turboserve.worker.chunks.total", "{chunk}"),
        ("turboserve.worker.publish_seconds", "s"),
        ("turboserve.worker.kv.bytes", "By"),
        ("turboserve.worker.publish.duration", "ms"),
        ("turboserve.worker.publish.duration", "seconds"),
        ("turboserve.worker.chunks", ""),
    ],
)
def test_a_metric_outside_the_scheme_is_refused(name: str, unit: str) -> None:
    worker = Instruments("worker")
    for create in (worker.counter, worker.up_down_counter, worker.gauge, worker.observed_gauge):
        with pytest.raises(TelemetryNameError, match=name):
            create(name, unit, "refused")
    with pytest.raises(TelemetryNameError, match=name):
        worker.histogram(name, unit, "refused")


def test_a_metric_is_declared_once() -> None:
    with pytest.raises(ValueError, match="declared twice"):
        Instruments("worker").counter("turboserve.worker.chunks", "{chunk}", "another meaning")


def test_no_service_creates_a_metric_outside_the_registry() -> None:
    # In a new interpreter, which has imported none of the modules.
    done = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == sorted(DECLARED)


def test_no_name_of_a_metric_is_a_level_of_another() -> None:
    assert [a for a in DECLARED for b in DECLARED if b.startswith(f"{a}.")] == []


def test_attributes_of_metrics_are_declared_or_conventional() -> None:
    used = {attribute for instrument in DECLARED.values() for attribute in instrument.attributes}
    conventional = conventional_attributes()
    assert [name for name in used if not is_own_attribute(name) and name not in conventional] == []


def test_declared_attributes_are_in_the_scheme() -> None:
    assert all(name.startswith("turboserve.") for name in ATTRIBUTES)
    assert not set(ATTRIBUTES) & conventional_attributes()
    assert is_own_attribute("turboserve.decision.numbers.latency_s")
    assert not is_own_attribute("turboserve.decision.numbers.Latency")
    assert not is_own_attribute("turboserve.session")


def test_only_declared_spans_are_in_the_scheme() -> None:
    for name in ("request state.session.create", "decide place", "generate chunk", "send own"):
        assert is_span(name), name
    for name in ("turboserve.worker.chunk", "decide", "generate chunk 3", "request state.session create"):
        assert not is_span(name), name


def test_a_value_within_an_exported_span_is_exported_with_an_exemplar(tmp_path: Path) -> None:
    with OtlpReceiver().running() as receiver:
        trace, span = run(tmp_path, RECORD, receiver.endpoint).split()
        found = [
            (each.trace, each.span, each.value)
            for each in receiver.exemplars
            if each.metric == "test.duration"
        ]
        assert found == [(trace, span, 0.25)]
        assert {each.id for each in receiver.spans} == {span}
