"""Which request a chunk's span continues, and what the span shows."""

from __future__ import annotations

import pytest
import torch
from opentelemetry.trace import StatusCode

from tests.helpers.recorded_spans import record_spans
from turboserve.telemetry import inject_context, use_span
from turboserve.worker.engine.interface import ChunkReady, ChunkTimings, Step
from turboserve.worker.service.spans import ChunkOrigin, RunTrace, chunk_span

PLACED, MOVED, FIRST, SECOND = (f"00-{number:032x}-{number:016x}-01" for number in range(1, 5))


def test_the_first_chunk_answers_the_assignment_and_the_next_follow_it() -> None:
    trace = RunTrace()
    trace.assign(PLACED)
    origin = trace.origin(0)
    assert (origin.cause, origin.related) == (PLACED, ())
    assert (trace.origin(0).cause, trace.origin(0).related) == (None, (PLACED,))


def test_the_same_assignment_again_causes_nothing() -> None:
    trace = RunTrace()
    trace.assign(PLACED)
    trace.origin(0)
    trace.assign(PLACED)
    assert trace.origin(0).cause is None
    trace.assign(MOVED)
    assert trace.origin(0).cause == MOVED


def test_a_chunk_answers_the_newest_prompt_that_it_shows() -> None:
    trace = RunTrace()
    trace.assign(PLACED)
    trace.origin(0)
    trace.prompt(1, FIRST)
    trace.prompt(1, FIRST)
    trace.prompt(2, SECOND)
    assert trace.origin(0).cause is None, "made under no prompt yet"
    origin = trace.origin(2)
    assert (origin.cause, origin.related) == (SECOND, (FIRST, PLACED))
    assert trace.origin(2).cause is None


def test_untraced_requests_cause_nothing() -> None:
    trace = RunTrace()
    trace.assign(None)
    trace.prompt(1, None)
    origin = trace.origin(1)
    assert (origin.cause, origin.related) == (None, ())


def test_a_chunks_span_has_its_stages_with_links_to_the_sessions_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = record_spans(monkeypatch)
    steps = (Step("text", 10.0, 10.5, ("mine",)), Step("denoise", 11.0, 12.0, ("other", "mine", "untraced")))
    timings = ChunkTimings(
        due_s=9.0, started_s=10.9, denoised_s=12.0, ready_s=13.0, decode_s=0.5, steps=steps
    )
    ready = ChunkReady("mine", 4, torch.zeros(1), torch.zeros(1), 2, 0.0, timings)
    origin = ChunkOrigin(SECOND, (FIRST, PLACED), {"other": MOVED, "untraced": None})
    chunk_span(ready, origin, 13.5, 14.0, lambda at_s: round(at_s * 1e9)).end(15_000_000_000)

    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert list(spans) == ["text", "denoise", "decode", "package", "generate chunk"]
    times = {name: (span.start_time, span.end_time) for name, span in spans.items()}
    assert {name: (begin / 1e9, end / 1e9) for name, (begin, end) in times.items() if begin and end} == {
        "text": (10.0, 10.5),
        "denoise": (11.0, 12.0),
        "decode": (12.5, 13.0),
        "package": (13.5, 14.0),
        "generate chunk": (10.0, 15.0),
    }
    chunk = spans["generate chunk"]
    assert chunk.context is not None
    assert chunk.parent is not None
    assert chunk.parent.trace_id == 4
    assert [link.context.trace_id for link in chunk.links] == [3, 1]
    for stage in ("text", "denoise", "decode", "package"):
        parent = spans[stage].parent
        assert parent is not None
        assert parent.span_id == chunk.context.span_id
    assert [link.context.trace_id for link in spans["denoise"].links] == [2]
    assert (spans["denoise"].attributes or {})["turboserve.batch.size"] == 3
    assert spans["text"].links == ()


def test_links_are_repeated_only_for_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = record_spans(monkeypatch)
    batches = [("mine",), ("mine", "other"), ("other", "mine"), ("mine",), ("mine", "other"), ("mine", "new")]
    steps = tuple(Step("denoise", 10.0 + at, 10.5 + at, batch) for at, batch in enumerate(batches))
    timings = ChunkTimings(
        due_s=9.0, started_s=10.0, denoised_s=16.0, ready_s=17.0, decode_s=0.5, steps=steps
    )
    ready = ChunkReady("mine", 4, torch.zeros(1), torch.zeros(1), 2, 0.0, timings)
    origin = ChunkOrigin(PLACED, (), {"other": MOVED, "new": FIRST})
    chunk_span(ready, origin, 17.0, 17.5, lambda at_s: round(at_s * 1e9)).end(18_000_000_000)
    forwards = [span for span in exporter.get_finished_spans() if span.name == "denoise"]
    linked = [[link.context.trace_id for link in span.links] for span in forwards]
    assert linked == [[], [2], [], [], [2], [3]]
    assert [(span.attributes or {})["turboserve.batch.size"] for span in forwards] == [1, 2, 2, 1, 2, 2]


def test_of_the_chunks_that_are_not_sampled_only_one_that_fails_is_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = record_spans(monkeypatch, periodic_ratio=0.0)
    trace = RunTrace()
    trace.assign(PLACED.removesuffix("01") + "00")
    origins = [trace.origin(0), trace.origin(0), trace.origin(0)]
    assert [origin.sampled for origin in origins] == [False, False, False]
    trace.prompt(1, FIRST)
    assert trace.origin(1).sampled
    steps = (Step("denoise", 10.0, 11.0, ("mine",)),)
    timings = ChunkTimings(
        due_s=9.0, started_s=10.0, denoised_s=11.0, ready_s=12.0, decode_s=0.5, steps=steps
    )
    ready = ChunkReady("mine", 4, torch.zeros(1), torch.zeros(1), 2, 0.0, timings)
    answering, good, bad = (
        chunk_span(ready, origin, 12.0, 12.5, lambda at_s: round(at_s * 1e9)) for origin in origins
    )
    for span in (answering, bad):
        span.set_status(StatusCode.ERROR)
    for span in (answering, good, bad):
        span.end(13_000_000_000)
    sent = exporter.get_finished_spans()
    assert [(span.name, span.start_time) for span in sent] == [("generate chunk", 10_000_000_000)] * 2
    assert sent[0].parent is not None
    assert sent[0].parent.trace_id == 1, "the trace of its cause"
    assert sent[1].parent is None


def test_only_a_sampled_chunk_is_the_parent_of_what_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    record_spans(monkeypatch, periodic_ratio=0.0)
    timings = ChunkTimings(due_s=9.0, started_s=10.0, denoised_s=11.0, ready_s=12.0, decode_s=0.5)
    ready = ChunkReady("mine", 4, torch.zeros(1), torch.zeros(1), 2, 0.0, timings)
    for origin in (ChunkOrigin(PLACED), ChunkOrigin(sampled=False)):
        with use_span(chunk_span(ready, origin, 12.0, 12.5, lambda at_s: round(at_s * 1e9))):
            assert ("traceparent" in inject_context({})) is origin.sampled
