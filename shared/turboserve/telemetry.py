"""OpenTelemetry: traces over OTLP when an endpoint is set, metrics for Prometheus always."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider, TraceBasedExemplarFilter
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import generate_latest

from turboserve import logs
from turboserve.config import Settings
from turboserve.instruments import export_zeros
from turboserve.recorded_span import CurrentSpan, IdentifiedResource, SpanRecorder, StageExporter
from turboserve.sampling import ExportOnError, ParentOrRatio
from turboserve.telemetry_names import ERROR_TYPE

TRACEPARENT = "TRACEPARENT"
"""Variable that tells a process in which span it was started, by OpenTelemetry's environment carriers."""

_sends_spans = False
"""Whether spans are exported. If not, no span is created: creating one takes as long as a request."""
_recorder: SpanRecorder | None = None
"""Begins spans. None: no provider of traces is installed."""
_NO_SPAN = nullcontext(trace.INVALID_SPAN)
_EMPTY = Context()
_W3C = TraceContextTextMapPropagator()
_TRACEPARENT = "traceparent"
REMEMBERED = 1024
"""Parsed texts `traceparent` that a process keeps. Links of batched chunks repeat the same few."""


def setup(service: str, settings: Settings) -> None:
    """Install the providers of traces and metrics. Call it once, at the start of a process."""
    resource = Resource.create({"service.name": f"turboserve-{service}", "process.pid": os.getpid()})
    readers: list[MetricReader] = [PrometheusMetricReader()]
    if settings.otlp_endpoint:
        # Imported here: the exporter imports an HTTP client that a stack without a collector does not need.
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        base = settings.otlp_endpoint.rstrip("/")
        sampler = ParentOrRatio(settings.trace_ratio, settings.trace_periodic_ratio)
        export_spans(OTLPSpanExporter(endpoint=f"{base}/v1/traces"), sampler, resource)
        readers.append(PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{base}/v1/metrics")))
    # Exemplars name the sampled span in which a value was recorded.
    exemplars = TraceBasedExemplarFilter()
    metrics.set_meter_provider(
        MeterProvider(resource=resource, metric_readers=readers, exemplar_filter=exemplars)
    )
    export_zeros()


def export_spans(exporter: SpanExporter, sampler: ParentOrRatio, resource: Resource) -> None:
    """Install the provider of traces, and create spans from now on. Call it once in a process."""
    global _recorder
    resource = IdentifiedResource(dict(resource.attributes), resource.schema_url)
    processor = ExportOnError(BatchSpanProcessor(StageExporter(exporter)))
    _recorder = SpanRecorder(sampler, resource, processor)
    # The provider flushes and stops the processor at the end of the process. Libraries' spans go through it.
    provider = TracerProvider(sampler=sampler, resource=resource)
    provider.add_span_processor(processor)
    # Without baggage: a client's own entries must not travel through the services.
    propagate.set_global_textmap(_W3C)
    trace.set_tracer_provider(provider)
    switch_tracing(on=True)


def switch_tracing(*, on: bool) -> None:
    """Create spans from now on, or none. Benchmarks compare the two."""
    global _sends_spans
    _sends_spans = on


class Tracer:
    """Begins the spans of one part of the project. If no spans are exported, each is the invalid span."""

    def __init__(self, name: str) -> None:
        self._scope = InstrumentationScope(f"turboserve.{name}")

    def start_as_current_span(
        self, name: str, *, notes_errors: bool = True, **options: Any
    ) -> AbstractContextManager[trace.Span]:
        """Return the context of a span. See `SpanRecorder.begin` for `options`.

        `notes_errors`: an exception is recorded and marks the span as failed. If not, the caller decides
        whether it is an error.
        """
        if not _sends_spans or _recorder is None:
            return _NO_SPAN
        return CurrentSpan(_recorder.begin(self._scope, name, **options), notes_errors=notes_errors)

    def start_span(self, name: str, **options: Any) -> trace.Span:
        """Begin a span, which the caller ends. See `SpanRecorder.begin` for `options`."""
        if not _sends_spans or _recorder is None:
            return trace.INVALID_SPAN
        return _recorder.begin(self._scope, name, **options)

    def child(self, name: str, **options: Any) -> AbstractContextManager[trace.Span]:
        """As `start_as_current_span`, but only within another span: for steps that also run at intervals.

        It notes no errors.
        """
        if not _sends_spans or not trace.get_current_span().get_span_context().is_valid:
            return _NO_SPAN
        return self.start_as_current_span(name, notes_errors=False, **options)

    def start_child(self, name: str, **options: Any) -> trace.Span:
        """As `start_span`, but only within another span."""
        if not _sends_spans or not trace.get_current_span().get_span_context().is_valid:
            return trace.INVALID_SPAN
        return self.start_span(name, **options)


def tracer(name: str) -> Tracer:
    return Tracer(name)


def tracing() -> bool:
    """Whether spans are exported."""
    return _sends_spans


def traceparent() -> str | None:
    """The context of the current span as W3C `traceparent`; None if there is no span."""
    if not _sends_spans:
        return None
    return _traceparent(trace.get_current_span())


def set_traceparent(environment: dict[str, str]) -> None:
    """Let the process that gets `environment` continue the current span, or none."""
    if (text := traceparent()) is not None:
        environment[TRACEPARENT] = text
    else:
        # What started this process did not start the other one.
        environment.pop(TRACEPARENT, None)


def _traceparent(span: trace.Span) -> str | None:
    context = span.get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@lru_cache(maxsize=REMEMBERED)
def _remote(text: str) -> trace.SpanContext:
    """Read a `traceparent`. An invalid text gives the invalid context."""
    return trace.get_current_span(_W3C.extract({_TRACEPARENT: text}, _EMPTY)).get_span_context()


@lru_cache(maxsize=REMEMBERED)
def _link(text: str) -> trace.Link | None:
    context = _remote(text)
    return trace.Link(context) if context.is_valid else None


def context_from(text: str | None) -> Context:
    """Read a context from a `traceparent`. None or an invalid text: the context without a span."""
    if text is None or not _sends_spans or not (remote := _remote(text)).is_valid:
        return _EMPTY
    return trace.set_span_in_context(trace.NonRecordingSpan(remote), _EMPTY)


def is_sampled(text: str | None) -> bool:
    """Whether spans are exported and this `traceparent` belongs to an exported trace."""
    if text is None or not _sends_spans:
        return False
    return _remote(text).trace_flags.sampled


def samples_next(text: str | None) -> bool:
    """Decide whether a span is sampled that continues this `traceparent`, or None: that is periodic work."""
    if text is not None:
        return is_sampled(text)
    return _sends_spans and _recorder is not None and _recorder.samples_periodic()


def links_to(*texts: str | None) -> list[trace.Link]:
    """Links to the spans with these `traceparent`s."""
    if not _sends_spans:
        return []
    return [link for text in texts if text is not None and (link := _link(text)) is not None]


def use_span(span: trace.Span) -> AbstractContextManager[object]:
    """Make `span` the current one for a block, unless it is invalid. The block does not end it."""
    if not span.get_span_context().is_valid:
        return _NO_SPAN
    return CurrentSpan(span, notes_errors=False, ends=False)


def set_error(span: trace.Span, error: BaseException, *, failed: bool = True) -> None:
    """Note on `span` which error ended it. `failed`: the span counts as failed, and is always exported."""
    span.set_attribute(ERROR_TYPE, str(getattr(error, "code", type(error).__name__)))
    if failed:
        span.set_status(trace.StatusCode.ERROR, str(error)[:200])


@contextmanager
def within(context: Context) -> Iterator[None]:
    """Make `context` the current one: spans that start within it are children of its span."""
    if not _sends_spans:
        yield
        return
    token = attach(context)
    try:
        yield
    finally:
        detach(token)


@contextmanager
def continuing(text: str | None) -> Iterator[None]:
    """Keep the current span if there is one. Otherwise continue the trace of this `traceparent`."""
    if not _sends_spans or trace.get_current_span().get_span_context().is_valid:
        yield
        return
    with within(context_from(text)):
        yield


def prometheus_text() -> bytes:
    """Return all metrics of this process in Prometheus' text format."""
    return generate_latest()


def inject_context(headers: dict[str, str]) -> dict[str, str]:
    """Add the trace context and the id of the client's request to message headers, if there are any."""
    if (name := logs.request_id()) is not None:
        headers[logs.REQUEST_HEADER] = name
    if _sends_spans and (text := _traceparent(trace.get_current_span())) is not None:
        headers[_TRACEPARENT] = text
    return headers


def context_of(headers: Mapping[str, str] | None) -> Context:
    """Read the trace context from message headers."""
    return context_from((headers or {}).get(_TRACEPARENT)) if _sends_spans else _EMPTY
