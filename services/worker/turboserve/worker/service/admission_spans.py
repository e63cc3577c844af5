"""Spans from a session's assignment to its admission: the wait for the log's end, latents and a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.trace import Span

from turboserve.bus.requests import SESSION
from turboserve.contracts.sessions import SessionRecord
from turboserve.telemetry import context_from, tracer
from turboserve.worker.service.session_entry import Absent, DesiredState, SessionEntry

_trace = tracer("worker")


class AdmissionSpans:
    """The open spans of one worker, at most one per session."""

    def __init__(self) -> None:
        self._open: dict[str, Span] = {}

    def assigned(self, records: Iterable[SessionRecord], entries: Mapping[str, SessionEntry]) -> None:
        """Begin a span for each session that is to run here and has no slot yet."""
        for record in records:
            entry = entries.get(record.id)
            if entry is None or record.id in self._open or not isinstance(entry.state, Absent):
                continue
            if entry.wanted is DesiredState.RUN and record.traceparent is not None:
                self._open[record.id] = _trace.start_span(
                    "admit session",
                    context=context_from(record.traceparent),
                    attributes={SESSION: record.id, "turboserve.epoch": record.epoch},
                )
        for session in self._open.keys() - entries.keys():
            self._end(session, "left")

    def admitted(self, session: str, next_chunk: int) -> None:
        """The engine has the session's admission."""
        span = self._open.pop(session, None)
        if span is not None:
            span.set_attribute("turboserve.chunk.index", next_chunk)
            span.end()

    def _end(self, session: str, reason: str) -> None:
        span = self._open.pop(session)
        span.set_attribute("error.type", reason)
        span.end()
