"""OpenTelemetry: traces over OTLP when an endpoint is set, metrics for Prometheus always."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from prometheus_client import generate_latest

from turboserve.config import Settings

Source = TypeVar("Source")

_sends_spans = False
"""Whether spans are exported. If not, no span is created: creating one takes as long as a request."""
_NO_SPAN = nullcontext(trace.INVALID_SPAN)
_EMPTY = Context()


def setup(service: str, settings: Settings) -> None:
    """Install the providers of traces and metrics. Call it once, at the start of a process."""
    global _sends_spans
    resource = Resource.create({"service.name": f"turboserve-{service}", "process.pid": os.getpid()})
    readers: list[MetricReader] = [PrometheusMetricReader()]
    if settings.otlp_endpoint:
        # Imported here: the exporter imports an HTTP client that a stack without a collector does not need.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        base = settings.otlp_endpoint.rstrip("/")
        tracer_provider = TracerProvider(resource=resource)
        tracer_provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{base}/v1/traces")))
        trace.set_tracer_provider(tracer_provider)
        _sends_spans = True
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{base}/v1/metrics")))
    metrics.set_meter_provider(MeterProvider(resource=resource, metric_readers=readers))


def meter(name: str) -> metrics.Meter:
    return metrics.get_meter(f"turboserve.{name}")


class Gauge(Generic[Source]):
    """A gauge that is read at every export of metrics: one value per source that still exists.

    A gauge holds weak references to its sources, because an instrument lives as long as the process.
    """

    def __init__(
        self,
        meter: metrics.Meter,
        name: str,
        read: Callable[[Source], float | None],
        description: str = "",
        unit: str = "",
    ) -> None:
        """`read` returns the value of one source, or None while the source has no value."""
        self._read = read
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()
        meter.create_observable_gauge(name, callbacks=[self._observe], unit=unit, description=description)

    def add(self, source: Source) -> None:
        """Export the value of `source` from now on."""
        self._sources.add(source)

    def _observe(self, _options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        values = [self._read(source) for source in list(self._sources)]
        return [metrics.Observation(value) for value in values if value is not None]


class Tracer:
    """OpenTelemetry's tracer if spans are exported. Otherwise every span is the invalid span."""

    def __init__(self, name: str) -> None:
        self._tracer = trace.get_tracer(f"turboserve.{name}")

    def start_as_current_span(self, name: str, **options: Any) -> AbstractContextManager[trace.Span]:
        """See `opentelemetry.trace.Tracer`."""
        return self._tracer.start_as_current_span(name, **options) if _sends_spans else _NO_SPAN

    def start_span(self, name: str, **options: Any) -> trace.Span:
        """See `opentelemetry.trace.Tracer`."""
        return self._tracer.start_span(name, **options) if _sends_spans else trace.INVALID_SPAN


def tracer(name: str) -> Tracer:
    return Tracer(name)


def prometheus_text() -> bytes:
    """Return all metrics of this process in Prometheus' text format."""
    return generate_latest()


def inject_context(headers: dict[str, str]) -> dict[str, str]:
    """Add the current trace context to message headers, if there is one."""
    if _sends_spans:
        inject(headers)
    return headers


def context_of(headers: Mapping[str, str] | None) -> Context:
    """Read the trace context from message headers."""
    return extract(dict(headers or {})) if _sends_spans else _EMPTY
