"""Spans as light as the path of a chunk needs them.

A span of OpenTelemetry's SDK takes about three times as long: it has a lock, bounded copies, and metrics of
its own. These spans belong to one task until they end, and only this project's code sets their attributes.
"""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from types import TracebackType

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes, AttributeValue

from turboserve.sampling import ParentOrRatio

SPANS_AT_ONCE = 512
"""Maximum of spans in one request to the collector, which may refuse a larger one. As the SDK's default."""

_ids, _UNSET = RandomIdGenerator(), Status()


class IdentifiedResource(Resource):
    """A resource whose hash is computed once. The exporter hashes the resource of every span."""

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = super().__hash__()
        return known

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


class RecordedSpan(trace.Span, ReadableSpan):
    """A span that is recorded, whether it is sampled or not. It is not safe for use by several threads."""

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        recorder: SpanRecorder,
        scope: InstrumentationScope,
        kind: SpanKind,
        attributes: Attributes,
        links: Sequence[Link],
        start_time: int,
    ) -> None:
        """`start_time`: Unix time, in nanoseconds. Attributes that are None are left out."""
        # The fields of `ReadableSpan`, whose constructor also makes a resource where none is given.
        self._name, self._parent, self._kind = name, parent, kind
        self._context = self._own = context
        self._resource, self._instrumentation_scope = recorder.resource, scope
        self._instrumentation_info = None
        self._start_time: int | None = start_time
        self._end_time: int | None = None
        self._attributes: dict[str, AttributeValue] = {
            key: value for key, value in (attributes or {}).items() if value is not None
        }
        self._events: list[Event] = []
        self._links: list[Link] = list(links)
        self._status = _UNSET
        self._processor = recorder.processor
        self.stages: Callable[[], Sequence[ReadableSpan]] | None = None
        """Makes the spans of the stages within this one, which are exported with it. `StageExporter` calls
        it, many spans at once: on the path of a chunk the same code is not in the processor's caches, and
        takes several times as long."""

    def get_span_context(self) -> SpanContext:
        """See `opentelemetry.trace.Span`."""
        return self._own

    def is_recording(self) -> bool:
        """Whether the span has not ended. An ended span ignores changes."""
        return self._end_time is None

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """See `opentelemetry.trace.Span`."""
        if self._end_time is None and value is not None:
            self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """See `opentelemetry.trace.Span`."""
        for key, value in attributes.items():
            self.set_attribute(key, value)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        """See `opentelemetry.trace.Span`."""
        if self._end_time is None:
            self._events.append(Event(name, attributes, timestamp))

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """See `opentelemetry.trace.Span`."""
        if self._end_time is None:
            self._links.append(Link(context, attributes))

    def update_name(self, name: str) -> None:
        """See `opentelemetry.trace.Span`."""
        if self._end_time is None:
            self._name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """See `opentelemetry.trace.Span`. The status OK is final."""
        new = status if isinstance(status, Status) else Status(status, description)
        final = self._status.status_code is StatusCode.OK or new.status_code is StatusCode.UNSET
        if self._end_time is None and not final:
            self._status = new

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Add the event `exception`, as the semantic conventions have it."""
        kind = type(exception)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        found: dict[str, AttributeValue] = {
            "exception.type": f"{module}{kind.__qualname__}",
            "exception.message": str(exception),
            "exception.stacktrace": "".join(traceback.format_exception(exception)),
            "exception.escaped": str(escaped),
        }
        self.add_event("exception", {**found, **(attributes or {})}, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """End the span, now or at this Unix time in nanoseconds. A second call does nothing."""
        if self._end_time is None:
            self._end_time = time.time_ns() if end_time is None else end_time
            self._processor.on_end(self)

    def stage(
        self,
        name: str,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes = None,
        links: Sequence[Link] = (),
    ) -> ReadableSpan:
        """Return a span within this one for what is already over. Times are Unix time in nanoseconds."""
        whole = self._own
        own = SpanContext(
            whole.trace_id, _ids.generate_span_id(), False, whole.trace_flags, whole.trace_state
        )
        return ReadableSpan(
            name,
            context=own,
            parent=whole,
            resource=self._resource,
            attributes=attributes,
            links=links,
            start_time=began_ns,
            end_time=ended_ns,
            instrumentation_scope=self._instrumentation_scope,
        )


class StageExporter(SpanExporter):
    """Exports spans with the spans of their stages."""

    def __init__(self, following: SpanExporter) -> None:
        """`following` exports all of them."""
        self._following = following

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        found: list[ReadableSpan] = []
        for span in spans:
            stages = span.stages if isinstance(span, RecordedSpan) else None
            found += [span] if stages is None else [*stages(), span]
        parts = [found[at : at + SPANS_AT_ONCE] for at in range(0, len(found), SPANS_AT_ONCE)]
        results = [self._following.export(part) for part in parts]
        return max(results, key=lambda result: result.value, default=SpanExportResult.SUCCESS)

    def shutdown(self) -> None:
        """See `SpanExporter`."""
        self._following.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """See `SpanExporter`."""
        return self._following.force_flush(timeout_millis)


class UnsampledSpan(trace.NonRecordingSpan):
    """Stands for a span of an unsampled trace, which begins only if it fails.

    Its context is invalid, so no span is its child, and no message continues its trace.
    """

    def __init__(self, begin: Callable[[], trace.Span]) -> None:
        """`begin` begins the span."""
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self._begin = begin
        self._attributes: dict[str, AttributeValue] = {}
        self._failed: trace.Span | None = None

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """See `opentelemetry.trace.Span`."""
        if self._failed is not None:
            self._failed.set_attribute(key, value)
        else:
            self._attributes[key] = value

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """See `opentelemetry.trace.Span`. An error begins the span."""
        failed = StatusCode.ERROR in (status, getattr(status, "status_code", None))
        if self._failed is None and failed:
            self._failed = self._begin()
            self._failed.set_attributes(self._attributes)
        if self._failed is not None:
            self._failed.set_status(status, description)

    def end(self, end_time: int | None = None) -> None:
        """See `opentelemetry.trace.Span`."""
        if self._failed is not None:
            self._failed.end(end_time)


class SpanRecorder:
    """Begins spans, and gives them to a processor when they end."""

    def __init__(self, sampler: ParentOrRatio, resource: Resource, processor: SpanProcessor) -> None:
        """`processor` needs only the ends of spans."""
        self.sampler, self.resource, self.processor = sampler, resource, processor

    def samples_periodic(self) -> bool:
        """Decide whether the next trace of periodic work is sampled."""
        bound = self.sampler.periodic_bound
        return bound > 0 and random.getrandbits(64) < bound

    def begin(
        self,
        scope: InstrumentationScope,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] = (),
        start_time: int | None = None,
        sampled: bool | None = None,
    ) -> RecordedSpan:
        """Begin a span within the span of `context` (None: the current one).

        `start_time`: Unix time in nanoseconds; None: now. `sampled`: whether a trace is sampled that begins
        here; None: the sampler decides.
        """
        parent = trace.get_current_span(context).get_span_context()
        if parent.is_valid:
            trace_id, flags, state = parent.trace_id, parent.trace_flags, parent.trace_state
            known: SpanContext | None = parent
        else:
            trace_id, known, state = _ids.generate_trace_id(), None, None
            if sampled is None:
                sampled = self.sampler.samples(trace_id, attributes)
            flags = TraceFlags(TraceFlags.RANDOM_TRACE_ID | (TraceFlags.SAMPLED if sampled else 0))
        own = SpanContext(
            trace_id, _ids.generate_span_id(), is_remote=False, trace_flags=flags, trace_state=state
        )
        began = time.time_ns() if start_time is None else start_time
        return RecordedSpan(name, own, known, self, scope, kind, attributes, links, began)


class CurrentSpan:
    """Context in which a span is the current one."""

    def __init__(self, span: trace.Span, *, notes_errors: bool, ends: bool = True) -> None:
        """`notes_errors`: an exception is recorded and marks the span as failed. `ends`: the span ends with
        the context."""
        self._span, self._notes_errors, self._ends = span, notes_errors, ends
        self._token: Token[Context] | None = None

    def __enter__(self) -> trace.Span:
        self._token = attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        assert self._token is not None
        detach(self._token)
        # Cancellations and exits are no errors.
        if self._notes_errors and isinstance(error, Exception):
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        if self._ends:
            self._span.end()
