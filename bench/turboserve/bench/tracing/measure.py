"""A worker's engine and packager in one thread, with traces switched on and off."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from turboserve import telemetry
from turboserve.bench.engine.models import PROMPT, toyworld
from turboserve.clock import SystemClock
from turboserve.sampling import ParentOrRatio
from turboserve.telemetry_names import EPOCH
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import EngineOptions
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.media import FragmentEncoder
from turboserve.worker.service import commands
from turboserve.worker.service.engine_commands import AdmitRequest
from turboserve.worker.service.engine_driver import EngineDriver
from turboserve.worker.service.packager import (
    ChunkPackager,
    FromEngine,
    GeneratedChunk,
    PackagedChunk,
    TensorEncoder,
)
from turboserve.worker.service.spans import ChunkOrigin, chunk_span

_trace = telemetry.tracer("bench")
EXPORT_INTERVAL_S = 5.0
"""Interval at which `BatchSpanProcessor` sends what it has."""
SPAN_BLOCKS = 40
NEVER_MS = 10**9


class _CountingExporter(OTLPSpanExporter):
    """Sends spans as the services do, and counts them."""

    count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            raise RuntimeError("the receiver did not take the spans")
        _CountingExporter.count += len(spans)
        return result


class _Switched(ParentOrRatio):
    """Samples periodic work or not, as it is set."""

    def sample_periodic(self, *, on: bool) -> None:
        self._periodic = ParentOrRatio(0.0, float(on))._periodic


_sampler = _Switched(1.0, 0.0)


def begin_tracing(endpoint: str) -> None:
    """Install the provider of traces, which sends spans to `endpoint`. Call it once in a process.

    Spans are sent by `TracedWorker.export` only, so that no block pays for the spans of another one.
    """
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(NEVER_MS)
    exporter = _CountingExporter(endpoint=endpoint)
    telemetry.export_spans(exporter, _sampler, Resource.create({"service.name": "bench"}))


@dataclass(frozen=True)
class BlockTime:
    """The processor's seconds of one chunk of a block."""

    chunk_s: float
    """All of it, over all threads."""
    host_s: float
    """The worker's own Python code, on the engine's thread: scheduling, bookkeeping, spans, packaging. The
    calls of the model, of the decoder and of the video's encoder are left out: they contain no code of
    tracing."""


class _KernelTime:
    """Seconds that the calling thread spent in the wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def measured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, whose time counts."""

        def call(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.thread_time() - began

        return call


class TracedWorker:
    """Sessions on one engine that generates as fast as it can."""

    def __init__(self, sessions: int) -> None:
        models = toyworld()
        weight = models.transformer.patch_embedding.weight
        layout = SlabLayout.of(models.transformer.config, weight.dtype)
        clock = SystemClock()
        engine = Engine(
            models,
            EngineOptions(sessions * layout.total_bytes, max_batch=sessions, max_lead_s=math.inf),
            clock=clock.monotonic,
        )
        self._driver = EngineDriver(engine, self._generated, clock.monotonic)
        # A run keeps trace contexts only if it began with tracing.
        self._driver.engine.records_steps = True
        self._driver.carry_out(commands.GenerateUntil(math.inf))
        encoder = TensorEncoder(FragmentEncoder(), weight.dtype)
        self._kernels = _KernelTime()
        for owner, name in (
            (engine.text, "compute"),
            (engine.forward, "compute"),
            (engine.decode, "compute"),
            (encoder, "encode"),
            (encoder, "latents"),
        ):
            setattr(owner, name, self._kernels.measured(getattr(owner, name)))
        self._packager = ChunkPackager(
            encoder, engine.config.fps, clock, engine.package, engine.fidelity.ladder
        )
        self._packaged = 0
        self._not_exported = 0
        self._last: GeneratedChunk | None = None
        for number in range(sessions):
            admit = commands.Admit(
                str(number), number, 0, PROMPT, number, 0, 0.0, traceparent=_context(number)
            )
            self._driver.carry_out(AdmitRequest(admit))
        self._sessions = sessions
        self.spans_per_chunk = 0.0
        """Spans of a chunk whose spans are all exported, measured by `span_seconds`."""

    def block(self, mode: str, chunks: int) -> BlockTime:
        """Generate `chunks` chunks of each session. The spans wait for `export`."""
        self._switch(mode)
        until, count = self._packaged + chunks * self._sessions, chunks * self._sessions
        self._kernels.seconds = 0.0
        began, thread_began = time.process_time(), time.thread_time()
        while self._packaged < until:
            for event in self._driver.step():
                self._driver.stamp(event)
        host_s = time.thread_time() - thread_began - self._kernels.seconds
        if mode == "sampled":
            self._not_exported += count
        return BlockTime((time.process_time() - began) / count, host_s / count)

    def export(self) -> float | None:
        """Send the spans of the blocks if they are as many as a worker sends at once.

        Returns the processor's seconds of one chunk's spans, or None: they wait.
        """
        if self._not_exported < self._request_chunks():
            return None
        began, chunks, self._not_exported = time.process_time(), self._not_exported, 0
        trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]
        return (time.process_time() - began) / chunks

    def _request_chunks(self) -> int:
        """Number of chunks that the sessions play in `EXPORT_INTERVAL_S`."""
        if self._last is None:
            return 1
        chunk_s = len(self._last.ready.frames) / self._driver.engine.config.fps
        return max(1, round(self._sessions * EXPORT_INTERVAL_S / chunk_s))

    def span_seconds(self, mode: str) -> float:
        """Measure the processor's seconds that one chunk's spans take, encoding and sending included.

        One request to the receiver has the spans of as many chunks as the sessions play in
        `EXPORT_INTERVAL_S`.
        """
        self._switch(mode)
        made = self._last
        assert made is not None
        rounds = self._request_chunks()
        provider, seconds = trace.get_tracer_provider(), []
        for _ in range(SPAN_BLOCKS):
            count, began = _CountingExporter.count, time.process_time()
            for _ in range(rounds):
                if telemetry.tracing():
                    origin = replace(made.origin, sampled=telemetry.samples_next(None))
                    _publish(chunk_span(made.ready, origin, 0.0, 0.001, lambda at_s: round(at_s * 1e9)))
            provider.force_flush()  # type: ignore[attr-defined]
            seconds.append((time.process_time() - began) / rounds)
            self.spans_per_chunk = max(self.spans_per_chunk, (_CountingExporter.count - count) / rounds)
        return statistics.median(seconds)

    def _switch(self, mode: str) -> None:
        traces = mode not in ("off", "control")
        telemetry.switch_tracing(on=traces)
        self._driver.engine.records_steps = traces
        _sampler.sample_periodic(on=mode == "sampled")

    def _generated(self, item: FromEngine) -> None:
        packaged = self._packager.convert(item)
        if isinstance(packaged, PackagedChunk):
            assert isinstance(item, GeneratedChunk)
            # A block may end in the middle of a chunk: keep one with all its steps.
            if self._last is None or len(item.ready.timings.steps) > len(self._last.ready.timings.steps):
                # As the engine driver does: without the session itself.
                batched = {
                    name: _context(int(name))
                    for step in item.ready.timings.steps
                    for name in step.sessions
                    if name != item.ready.session
                }
                self._last = GeneratedChunk(
                    item.run, item.ready, item.concurrent_sessions, ChunkOrigin(batched=batched)
                )
            self._packaged += 1
            _publish(packaged.span)


def _publish(span: trace.Span) -> None:
    """What an append does for tracing. In a worker, it runs concurrently with the engine."""
    if telemetry.tracing():
        span.set_attribute(EPOCH, 1)
    with telemetry.use_span(span):
        if telemetry.tracing():
            with _trace.child("send chunk", kind=trace.SpanKind.PRODUCER):
                telemetry.inject_context({})
        else:
            telemetry.inject_context({})
    span.end()


def _context(number: int) -> str:
    return f"00-{number + 1:032x}-{number + 1:016x}-01"
