"""Spans of this process in memory, by the recorder, processor and exporter of the services."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from turboserve import telemetry
from turboserve.recorded_span import IdentifiedResource, SpanRecorder, StageExporter
from turboserve.sampling import ExportOnError, ParentOrRatio


def record_spans(monkeypatch: pytest.MonkeyPatch, periodic_ratio: float = 1.0) -> InMemorySpanExporter:
    """Create spans from now on. Returns the exporter that keeps those that are exported."""
    exporter = InMemorySpanExporter()
    processor = ExportOnError(SimpleSpanProcessor(StageExporter(exporter)))
    recorder = SpanRecorder(ParentOrRatio(1.0, periodic_ratio), IdentifiedResource({}), processor)
    monkeypatch.setattr(telemetry, "_sends_spans", True)
    monkeypatch.setattr(telemetry, "_recorder", recorder)
    return exporter
