"""Spans of a viewer's chunks: their delivery, and the first frame on the viewer's screen."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from turboserve.bus.client import SESSION
from turboserve.gateway.stream.chunks import Chunk
from turboserve.telemetry import QUIET, context_from, is_sampled, tracer

_trace = tracer("gateway")


class DeliverySpans:
    """The spans of one viewer."""

    def __init__(self, viewer: str) -> None:
        self._viewer = viewer
        self._first: tuple[int, str | None, int] | None = None
        """Index and trace context of the first chunk that was sent, and when it was, Unix ns."""

    def deliver(self, chunk: Chunk) -> AbstractContextManager[Span]:
        """Return the span within which `chunk` is sent. Only sampled chunks have one."""
        if self._first is None:
            self._first = chunk.header.index, chunk.traceparent, time.time_ns()
        if not is_sampled(chunk.traceparent):
            return nullcontext(INVALID_SPAN)
        return _trace.start_as_current_span(
            "deliver chunk",
            context=context_from(chunk.traceparent),
            kind=SpanKind.CONSUMER,
            attributes={
                "messaging.system": "nats",
                "messaging.destination.template": "chunk.{id}",
                "messaging.operation.name": "deliver",
                "messaging.operation.type": "process",
                SESSION: chunk.header.session,
                "turboserve.chunk.index": chunk.header.index,
                "turboserve.viewer.id": self._viewer,
            },
            # A viewer who leaves is no error.
            **QUIET,
        )

    def shown(self, session: str) -> None:
        """The viewer shows its first frame. Later calls do nothing."""
        if self._first is None:
            return
        index, traceparent, sent_at = self._first
        self._first = index, None, sent_at
        if not is_sampled(traceparent):
            return
        span = _trace.start_span(
            "show first frame",
            context=context_from(traceparent),
            start_time=sent_at,
            attributes={
                SESSION: session,
                "turboserve.chunk.index": index,
                "turboserve.viewer.id": self._viewer,
            },
        )
        span.end()
