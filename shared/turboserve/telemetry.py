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
"""Whether there is somewhere to send them. If not, none are made: making one takes as long as a request."""
_NO_SPAN = nullcontext(trace.INVALID_SPAN)
_EMPTY = Context()


def setup(service: str, settings: Settings) -> None:
    """Install the providers; called once at the start of a process."""
    global _sends_spans
    resource = Resource.create({"service.name": f"turboserve-{service}", "process.pid": os.getpid()})
    readers: list[MetricReader] = [PrometheusMetricReader()]
    if settings.otlp_endpoint:
        # Imported here: the exporter pulls in an HTTP client that a stack without a collector does not need.
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
    """A gauge that is read when metrics are asked for: one value of each source that still exists.

    Instruments live as long as the process, so a gauge does not keep its sources alive.
    """

    def __init__(
        self,
        meter: metrics.Meter,
        name: str,
        read: Callable[[Source], float | None],
        description: str = "",
        unit: str = "",
    ) -> None:
        """`read`: the value of one source; None while it has none."""
        self._read = read
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()
        meter.create_observable_gauge(name, callbacks=[self._observe], unit=unit, description=description)

    def add(self, source: Source) -> None:
        """Export this source's value from now on."""
        self._sources.add(source)

    def _observe(self, _options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        values = [self._read(source) for source in list(self._sources)]
        return [metrics.Observation(value) for value in values if value is not None]


class Tracer:
    """OpenTelemetry's tracer, while spans are sent anywhere; else every span is the invalid one."""

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
    """All metrics of this process in Prometheus' text format."""
    return generate_latest()


def inject_context(headers: dict[str, str]) -> dict[str, str]:
    """Add the current trace context to message headers, if there is one."""
    if _sends_spans:
        inject(headers)
    return headers


def context_of(headers: Mapping[str, str] | None) -> Context:
    """The trace context that message headers carry."""
    return extract(dict(headers or {})) if _sends_spans else _EMPTY
