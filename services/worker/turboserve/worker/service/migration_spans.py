"""Spans of a migration at its two workers."""

from __future__ import annotations

from contextlib import AbstractContextManager

from opentelemetry.trace import Span, set_span_in_context

from turboserve.bus.requests import SESSION
from turboserve.telemetry import context_from, tracer
from turboserve.worker.service.commands import FetchState

_trace = tracer("worker")


def fetch_span(command: FetchState) -> AbstractContextManager[Span]:
    """Return the span of the target's copy, within which each round has a span."""
    return _trace.start_as_current_span(
        "fetch state",
        context=context_from(command.traceparent),
        attributes={SESSION: command.session, "turboserve.migration.on_host": command.on_host},
    )


class SendSpans:
    """The spans of the sessions that migrate from this worker, one for each transfer attempt."""

    def __init__(self) -> None:
        self._open: dict[str, Span] = {}

    def began(self, session: str, traceparent: str | None) -> None:
        """A transfer attempt begins."""
        self.ended(session)
        if traceparent is not None:
            self._open[session] = _trace.start_span(
                "send state", context=context_from(traceparent), attributes={SESSION: session}
            )

    def step(self, name: str, session: str) -> AbstractContextManager[Span]:
        """Return the span of one step of the session's attempt, which also shows how the step failed."""
        span = self._open.get(session)
        if span is None:
            return _trace.child(name)
        return _trace.start_as_current_span(
            name, context=set_span_in_context(span), attributes={SESSION: session}
        )

    def ended(self, session: str) -> None:
        """The transfer attempt has ended, with or without the whole state."""
        span = self._open.pop(session, None)
        if span is not None:
            span.end()
