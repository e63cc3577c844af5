"""Spans of the services' own class: they are exported as those of OpenTelemetry's SDK are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.util.types import Attributes

from tests.helpers.recorded_spans import record_spans
from turboserve import telemetry
from turboserve.recorded_span import (
    SPANS_AT_ONCE,
    IdentifiedResource,
    RecordedSpan,
    StageExporter,
    UnsampledSpan,
)

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CLIENT.removesuffix("01") + "00"
STARTED, ENDED = 1_000_000_000, 2_000_000_000


def plays(begin: Callable[..., Any], current: Callable[..., Any]) -> None:
    """Use everything that the services use of spans."""
    linked = [Link(trace.SpanContext(3, 4, is_remote=True))]
    attributes: Mapping[str, Any] = {"text": "a", "number": 1, "flags": (True, False), "share": 0.5}
    span = begin("plain", attributes=attributes, links=linked, start_time=STARTED, kind=SpanKind.PRODUCER)
    span.set_attribute("later", "b")
    span.set_attributes({"number": 2})
    span.add_event("noted", {"how": "well"}, 1_500_000_000)
    span.update_name("renamed")
    span.end(ENDED)
    with current("parent", context=telemetry.context_from(CLIENT)):
        begin("child", start_time=STARTED).end(ENDED)
    with suppress(ValueError), current("failed"):
        raise ValueError("no such thing")
    with suppress(asyncio.CancelledError), current("cancelled"):
        raise asyncio.CancelledError
    settled = begin("settled", start_time=STARTED)
    settled.set_status(StatusCode.UNSET)
    settled.set_status(Status(StatusCode.ERROR, "first"))
    settled.set_status(StatusCode.OK)
    settled.set_status(StatusCode.ERROR, "too late")
    settled.end(ENDED)
    settled.end(3_000_000_000)


def exported(span: ReadableSpan) -> dict[str, Any]:
    """Return the span as it is sent, without its ids and what depends on the time."""
    (sent,) = encode_spans([span]).resource_spans[0].scope_spans[0].spans
    for event in sent.events:
        event.time_unix_nano = 0
        for each in event.attributes:
            if each.key == "exception.stacktrace":
                each.value.string_value = each.value.string_value.splitlines()[-1]
    times = (sent.start_time_unix_nano, sent.end_time_unix_nano)
    return {
        "name": sent.name,
        "kind": sent.kind,
        "trace": sent.trace_id.hex() if sent.parent_span_id else "",
        "root": not sent.parent_span_id,
        "flags": sent.flags,
        "times": times if times[0] == STARTED else None,
        "attributes": {each.key: str(each.value) for each in sent.attributes},
        "events": [str(each) for each in sent.events],
        "links": [(each.trace_id, each.span_id, each.flags) for each in sent.links],
        "status": str(sent.status),
    }


def test_spans_are_exported_as_those_of_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = record_spans(monkeypatch), InMemorySpanExporter()
    tracer = telemetry.tracer("test")
    plays(tracer.start_span, tracer.start_as_current_span)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(theirs))
    sdk = provider.get_tracer("turboserve.test")
    plays(sdk.start_span, sdk.start_as_current_span)
    found = [exported(span) for span in ours.get_finished_spans()]
    assert [one["name"] for one in found] == [
        "renamed", "child", "parent", "failed", "cancelled", "settled"
    ]  # fmt: skip
    assert found == [exported(span) for span in theirs.get_finished_spans()]


def test_a_root_is_sampled_by_the_ratio_and_a_child_as_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    record_spans(monkeypatch)
    tracer = telemetry.tracer("test")
    flags = [
        tracer.start_span("root").get_span_context().trace_flags,
        tracer.start_span("forced", sampled=False).get_span_context().trace_flags,
        tracer.start_span("child", context=telemetry.context_from(CLIENT)).get_span_context().trace_flags,
        tracer.start_span("child", context=telemetry.context_from(UNSAMPLED)).get_span_context().trace_flags,
    ]
    # The flag of random trace ids is set where this process chose the id.
    assert flags == [3, 2, 1, 0]


def test_an_ended_span_ignores_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = record_spans(monkeypatch)
    span = telemetry.tracer("test").start_span("over", attributes={"known": 1, "unknown": None})
    span.end()
    span.set_attribute("late", 1)
    span.add_event("late")
    span.add_link(trace.SpanContext(3, 4, is_remote=True))
    span.update_name("late")
    span.set_status(StatusCode.ERROR)
    (sent,) = exporter.get_finished_spans()
    assert (sent.name, sent.attributes, sent.events, sent.links) == ("over", {"known": 1}, (), ())
    assert sent.status.status_code is StatusCode.UNSET
    assert not span.is_recording()


def test_a_span_of_an_unsampled_trace_begins_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = record_spans(monkeypatch)
    tracer = telemetry.tracer("test")
    good, bad = (
        UnsampledSpan(lambda: tracer.start_span("chunk", start_time=STARTED, sampled=False)) for _ in range(2)
    )
    for span in (good, bad):
        span.set_attribute("turboserve.epoch", 3)
        span.set_status(StatusCode.OK)
        assert not span.get_span_context().is_valid
    bad.set_status(StatusCode.ERROR, "refused")
    bad.set_attribute("error.type", "fenced")
    good.end()
    bad.end(ENDED)
    (sent,) = exporter.get_finished_spans()
    assert (sent.start_time, sent.end_time, sent.status.description) == (STARTED, ENDED, "refused")
    assert sent.attributes == {"turboserve.epoch": 3, "error.type": "fenced"}
    assert sent.get_span_context() is not None


def test_stages_are_exported_with_their_span(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = record_spans(monkeypatch)
    span = telemetry.tracer("test").start_span("chunk")
    assert isinstance(span, RecordedSpan)
    span.stages = lambda: [span.stage("decode", STARTED, ENDED, {"turboserve.batch.size": 2})]
    span.end()
    stage, whole = exporter.get_finished_spans()
    assert (stage.name, stage.start_time, stage.end_time, stage.attributes) == (
        "decode", STARTED, ENDED, {"turboserve.batch.size": 2}
    )  # fmt: skip
    assert stage.parent == whole.get_span_context()


def test_a_request_to_the_collector_is_bounded_whatever_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    record_spans(monkeypatch)
    span = telemetry.tracer("test").start_span("chunk")
    assert isinstance(span, RecordedSpan)
    span.stages = lambda: [span.stage("step", STARTED, ENDED)] * 9
    sizes: list[int] = []

    class Collector(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            sizes.append(len(spans))
            return SpanExportResult.FAILURE if len(sizes) == 2 else SpanExportResult.SUCCESS

    assert StageExporter(Collector()).export([span] * 120) is SpanExportResult.FAILURE
    assert sizes == [SPANS_AT_ONCE, SPANS_AT_ONCE, 1200 - 2 * SPANS_AT_ONCE]


def test_a_resource_is_hashed_as_the_sdk_does() -> None:
    known: Attributes = {"service.name": "a", "process.pid": 1}
    other: Attributes = {"service.name": "b"}
    assert known is not None
    assert other is not None
    assert hash(IdentifiedResource(known)) == hash(Resource(known)) == hash(IdentifiedResource(known))
    assert IdentifiedResource(known) == Resource(known)
    assert IdentifiedResource(known) != IdentifiedResource(other)
