"""Which spans are exported, with OpenTelemetry's SDK and an exporter in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from turboserve.sampling import HELD_SPANS, HELD_TRACES, ExportOnError, ParentOrRatio
from turboserve.telemetry_names import PERIODIC


class Traced:
    """A tracer with this process's sampler and processor."""

    def __init__(self, ratio: float, periodic_ratio: float) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=ParentOrRatio(ratio, periodic_ratio), shutdown_on_exit=False)
        self.processor = ExportOnError(SimpleSpanProcessor(self.exporter))
        self.provider.add_span_processor(self.processor)
        self.tracer: Tracer = self.provider.get_tracer("test")

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


@pytest.fixture
def unsampled() -> Iterator[Traced]:
    traced = Traced(0.0, 0.0)
    yield traced
    traced.provider.shutdown()


def remote(flags: int) -> Context:
    return set_span_in_context(NonRecordingSpan(SpanContext(7, 8, True, TraceFlags(flags))))


def test_requests_are_sampled_and_heartbeats_are_not() -> None:
    traced = Traced(1.0, 0.0)
    traced.tracer.start_span("request").end()
    traced.tracer.start_span("heartbeat", attributes={PERIODIC: True}).end()
    traced.tracer.start_span("GET", attributes={"url.path": "/metrics"}).end()
    assert traced.names == ["request"]


def test_a_ratio_applies_to_periodic_work_too() -> None:
    traced = Traced(0.0, 1.0)
    traced.tracer.start_span("request").end()
    traced.tracer.start_span("heartbeat", attributes={PERIODIC: True}).end()
    assert traced.names == ["heartbeat"]


@pytest.mark.parametrize(("flags", "exported"), [(1, ["child"]), (0, [])])
def test_the_parent_decides_whatever_the_ratio(flags: int, exported: list[str]) -> None:
    for ratio in (0.0, 1.0):
        traced = Traced(ratio, ratio)
        traced.tracer.start_span("child", context=remote(flags), attributes={PERIODIC: True}).end()
        assert traced.names == exported


def test_a_child_of_a_heartbeat_is_not_sampled() -> None:
    traced = Traced(1.0, 0.0)
    with (
        traced.tracer.start_as_current_span("heartbeat", attributes={PERIODIC: True}),
        traced.tracer.start_as_current_span("query"),
    ):
        pass
    assert traced.names == []


def test_an_error_exports_the_spans_of_its_trace(unsampled: Traced) -> None:
    with unsampled.tracer.start_as_current_span("good"):
        unsampled.tracer.start_span("also good").end()
    with unsampled.tracer.start_as_current_span("first"):
        unsampled.tracer.start_span("before").end()
        failed = unsampled.tracer.start_span("failed")
        failed.set_status(StatusCode.ERROR)
        failed.end()
        unsampled.tracer.start_span("after").end()
        assert unsampled.names == [], "decided at the end of the trace's first span"
    assert unsampled.names == ["before", "failed", "after", "first"]
    spans = unsampled.exporter.get_finished_spans()
    assert len({span.context.trace_id for span in spans if span.context is not None}) == 1
    assert all(span.context is not None and span.context.trace_flags.sampled for span in spans)
    first = next(span.context for span in spans if span.name == "first")
    assert first is not None
    assert {span.parent.span_id for span in spans if span.parent is not None} == {first.span_id}


def test_a_failed_request_of_an_unsampled_client_is_exported(unsampled: Traced) -> None:
    span = unsampled.tracer.start_span("process", context=remote(0))
    span.set_status(StatusCode.ERROR)
    span.end()
    assert unsampled.names == ["process"]


def test_an_error_after_the_end_of_its_trace_is_exported_at_the_stop() -> None:
    traced = Traced(0.0, 0.0)
    first = traced.tracer.start_span("first")
    late = traced.tracer.start_span("late", context=set_span_in_context(first))
    first.end()
    late.set_status(StatusCode.ERROR)
    late.end()
    assert traced.names == []
    traced.provider.shutdown()
    assert traced.names == ["late"]


def test_what_is_held_is_bounded_and_an_error_is_not_lost(unsampled: Traced) -> None:
    """Spans that end after their trace's first span wait for nothing: the oldest trace gives way."""
    for number in range(HELD_TRACES + 1):
        first = unsampled.tracer.start_span("first")
        late = unsampled.tracer.start_span(f"late {number}", context=set_span_in_context(first))
        first.end()
        if number == 0:
            late.set_status(StatusCode.ERROR)
        late.end()
    assert unsampled.names == ["late 0"]
    with unsampled.tracer.start_as_current_span("long"):
        for _ in range(2 * HELD_SPANS):
            unsampled.tracer.start_span("step").end()
        failed = unsampled.tracer.start_span("failed")
        failed.set_status(StatusCode.ERROR)
        failed.end()
    assert unsampled.names.count("step") == HELD_SPANS
    assert "failed" in unsampled.names


def test_threads_may_end_spans_of_one_trace(unsampled: Traced) -> None:
    with unsampled.tracer.start_as_current_span("first") as first:
        context = set_span_in_context(first)

        def work() -> None:
            for _ in range(8):
                span = unsampled.tracer.start_span("step", context=context)
                span.set_status(StatusCode.ERROR)
                span.end()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(unsampled.names) == ["first", *["step"] * 32]
