"""An OTLP receiver over HTTP: parses the exported spans and metrics, and keeps them."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

ERROR = 2
"""Status code of a failed span."""


@dataclass(frozen=True)
class ReceivedSpan:
    """One exported span. Ids are hexadecimal, times Unix nanoseconds."""

    trace: str
    id: str
    parent: str
    """Empty: the span is a root."""
    service: str
    name: str
    kind: int
    failed: bool
    begins_ns: int
    ends_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    """Trace and span of each link."""

    def __str__(self) -> str:
        return f"{self.service}: {self.name} {self.attributes}"


class OtlpReceiver:
    """Keeps what all services of a stack export. `endpoint` is the URL for `TURBOSERVE_OTLP_ENDPOINT`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[str, ReceivedSpan] = {}
        self._exemplars: list[tuple[str, str]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver._receive(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[OtlpReceiver]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans.values())

    @property
    def exemplars(self) -> list[tuple[str, str]]:
        """Metric and trace of each exemplar."""
        with self._lock:
            return list(self._exemplars)

    def trace(self, trace: str) -> list[ReceivedSpan]:
        return sorted((span for span in self.spans if span.trace == trace), key=lambda span: span.begins_ns)

    async def until(
        self, condition: Callable[[Sequence[ReceivedSpan]], bool], limit_s: float, trace: str
    ) -> list[ReceivedSpan]:
        """Wait until the spans of `trace` satisfy `condition`. Returns them, in the order of their begin."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition(found := self.trace(trace)):
                    await asyncio.sleep(0.1)
                return found
        except TimeoutError:
            names = "\n".join(map(str, self.trace(trace)))
            raise AssertionError(f"the trace {trace} has only:\n{names}") from None

    async def until_exemplar(self, trace: str, limit_s: float) -> None:
        """Wait until a histogram has an exemplar of `trace`."""
        async with asyncio.timeout(limit_s):
            while all(found != trace for _, found in self.exemplars):
                await asyncio.sleep(0.2)

    def _receive(self, path: str, body: bytes) -> None:
        if path.endswith("/v1/traces"):
            spans = {span.id: span for span in _spans(ExportTraceServiceRequest.FromString(body))}
            with self._lock:
                self._spans |= spans
        elif path.endswith("/v1/metrics"):
            exemplars = list(_exemplars(ExportMetricsServiceRequest.FromString(body)))
            with self._lock:
                self._exemplars += exemplars


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        service = _values(resource.resource.attributes)["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    service=service,
                    name=span.name,
                    kind=span.kind,
                    failed=span.status.code == ERROR,
                    begins_ns=span.start_time_unix_nano,
                    ends_ns=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                )


def _exemplars(request: ExportMetricsServiceRequest) -> Iterator[tuple[str, str]]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.histogram.data_points:
                    for exemplar in point.exemplars:
                        yield metric.name, exemplar.trace_id.hex()


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
