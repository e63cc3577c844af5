"""Which spans are exported: a sampler, and a processor that exports unsampled spans after an error."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import Attributes

from turboserve.telemetry_names import PERIODIC

POLLED = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that monitors request at intervals."""
HELD_TRACES = 256
"""Unsampled traces whose spans are held at once, for the case that one of the spans fails."""
HELD_SPANS = 64
"""Spans that are held of one unsampled trace."""


class ParentOrRatio(Sampler):
    """Follows the parent's decision. Without a parent: a ratio, and another ratio for periodic work.

    An unsampled span is recorded nevertheless, so that `ExportOnError` can export it.
    """

    def __init__(self, ratio: float, periodic_ratio: float) -> None:
        """Both ratios are between 0 and 1."""
        self._ratio, self._periodic = TraceIdRatioBased(ratio), TraceIdRatioBased(periodic_ratio)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """See `Sampler`."""
        parent = trace.get_current_span(parent_context).get_span_context()
        if parent.is_valid:
            sampled = parent.trace_flags.sampled
            trace_state = parent.trace_state
        else:
            sampled = self.samples(trace_id, attributes)
        decision = Decision.RECORD_AND_SAMPLE if sampled else Decision.RECORD_ONLY
        return SamplingResult(decision, attributes, trace_state)

    @property
    def periodic_bound(self) -> int:
        """Periodic work is sampled where 64 random bits are below this bound."""
        return self._periodic.bound

    def samples(self, trace_id: int, attributes: Attributes) -> bool:
        """Whether a trace is sampled whose first span has these attributes."""
        values = attributes or {}
        periodic = values.get(PERIODIC) or values.get("url.path") in POLLED
        ratio = self._periodic if periodic else self._ratio
        return trace_id & ratio.TRACE_ID_LIMIT < ratio.bound

    def get_description(self) -> str:
        """See `Sampler`."""
        return f"ParentOrRatio({self._ratio.rate}, periodic {self._periodic.rate})"


@dataclass(eq=False)
class _HeldTrace:
    """Spans of one unsampled trace in this process."""

    spans: list[ReadableSpan] = field(default_factory=list)
    failed: bool = False


class ExportOnError(SpanProcessor):
    """Passes sampled spans on. Holds unsampled ones, and passes them on if one of them fails.

    The spans of an unsampled trace are decided together when the first of them in this process ends. A trace
    with an error is exported by each process that saw the error, as far as that process has spans of it.
    """

    def __init__(self, following: SpanProcessor) -> None:
        """`following` exports the spans that it gets, if their context is sampled."""
        self._following = following
        self._lock = threading.Lock()
        self._held: OrderedDict[int, _HeldTrace] = OrderedDict()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See `SpanProcessor`."""
        self._following.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`."""
        context = span.get_span_context()
        if context is None:
            return
        if context.trace_flags.sampled:
            self._following.on_end(span)
            return
        first = span.parent is None or span.parent.is_remote
        failed = span.status.status_code is StatusCode.ERROR
        if first and not failed and context.trace_id not in self._held:
            return
        for each in self._decided(context.trace_id, span, first=first, failed=failed):
            self._following.on_end(_as_sampled(each))

    def _decided(
        self, trace_id: int, span: ReadableSpan, *, first: bool, failed: bool
    ) -> Sequence[ReadableSpan]:
        """Hold `span`. Return the spans to export: of its trace if that ends here, or of a dropped one."""
        with self._lock:
            held = self._held.setdefault(trace_id, _HeldTrace())
            held.failed = held.failed or failed
            if len(held.spans) < HELD_SPANS or failed:
                held.spans.append(span)
            if first:
                del self._held[trace_id]
            elif len(self._held) > HELD_TRACES:
                _, held = self._held.popitem(last=False)
            else:
                return ()
        return held.spans if held.failed else ()

    def shutdown(self) -> None:
        """See `SpanProcessor`."""
        with self._lock:
            left, self._held = list(self._held.values()), OrderedDict()
        for held in left:
            for span in held.spans if held.failed else ():
                self._following.on_end(_as_sampled(span))
        self._following.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See `SpanProcessor`."""
        return self._following.force_flush(timeout_millis)


def _as_sampled(span: ReadableSpan) -> ReadableSpan:
    """Return a copy whose context is sampled, since processors and exporters drop other spans."""
    context = span.get_span_context()
    assert context is not None
    return ReadableSpan(
        name=span.name,
        context=SpanContext(
            context.trace_id,
            context.span_id,
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
            trace_state=context.trace_state,
        ),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
