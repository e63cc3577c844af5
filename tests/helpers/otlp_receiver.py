"""An OTLP receiver over HTTP: parses the exported spans and metrics, and keeps them."""

from __future__ import annotations

import gzip
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.semconv import attributes
from opentelemetry.semconv._incubating import attributes as incubating

from tests.helpers.waiting import eventually
from turboserve.cli.reference.metrics import instruments
from turboserve.telemetry_names import is_own_attribute, is_span

DECLARED = {instrument.name: instrument for instrument in instruments()}
"""Name → declaration of every metric of the services."""
OWN_SCOPE = "turboserve."
"""Names of the services' own tracers and meters begin with this."""
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
    scope: str
    """Name of the tracer."""
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


@dataclass(frozen=True)
class ReceivedMetric:
    """What was exported of one metric."""

    scope: str
    """Name of the meter."""
    name: str
    unit: str
    attributes: frozenset[str]
    """Names of the attributes of one of its values."""


@dataclass(frozen=True)
class ReceivedExemplar:
    """One exemplar of a histogram: the span in which a value was recorded."""

    metric: str
    trace: str
    span: str
    value: float


class OtlpReceiver:
    """Keeps what all services of a stack export. `endpoint` is the URL for `TURBOSERVE_OTLP_ENDPOINT`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[str, ReceivedSpan] = {}
        self._metrics: set[ReceivedMetric] = set()
        self._exemplars: list[ReceivedExemplar] = []
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
    def metrics(self) -> set[ReceivedMetric]:
        with self._lock:
            return set(self._metrics)

    @property
    def exemplars(self) -> list[ReceivedExemplar]:
        with self._lock:
            return list(self._exemplars)

    def trace(self, trace: str) -> list[ReceivedSpan]:
        return sorted((span for span in self.spans if span.trace == trace), key=lambda span: span.begins_ns)

    async def until(
        self, condition: Callable[[Sequence[ReceivedSpan]], bool], limit_s: float, trace: str
    ) -> list[ReceivedSpan]:
        """Wait until the spans of `trace` satisfy `condition`. Returns them, in the order of their begin."""

        def only() -> str:
            return f"the trace {trace} has only:\n" + "\n".join(map(str, self.trace(trace)))

        await eventually(lambda: condition(self.trace(trace)), limit_s, only)
        return self.trace(trace)

    async def until_exemplars(self, metrics: set[str], limit_s: float) -> None:
        """Wait until each of these histograms has an exemplar that names an exported trace.

        A histogram keeps one exemplar for each bucket and export, the newest. So a later request's may have
        taken the place of an earlier one's.
        """

        def found() -> set[str]:
            exported = {span.trace for span in self.spans}
            return {each.metric for each in self.exemplars if each.trace in exported}

        await eventually(lambda: metrics <= found(), limit_s, lambda: f"only {found()} have exemplars")

    def _receive(self, path: str, body: bytes) -> None:
        if path.endswith("/v1/traces"):
            spans = {span.id: span for span in _spans(ExportTraceServiceRequest.FromString(body))}
            with self._lock:
                self._spans |= spans
        elif path.endswith("/v1/metrics"):
            request = ExportMetricsServiceRequest.FromString(body)
            metrics, exemplars = set(_metrics(request)), list(_exemplars(request))
            with self._lock:
                self._metrics |= metrics
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
                    scope=scope.scope.name,
                    name=span.name,
                    kind=span.kind,
                    failed=span.status.code == ERROR,
                    begins_ns=span.start_time_unix_nano,
                    ends_ns=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                )


def _metrics(request: ExportMetricsServiceRequest) -> Iterator[ReceivedMetric]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                data = getattr(metric, str(metric.WhichOneof("data")))
                for point in data.data_points:
                    attributes = frozenset(each.key for each in point.attributes)
                    yield ReceivedMetric(scope.scope.name, metric.name, metric.unit, attributes)


def _exemplars(request: ExportMetricsServiceRequest) -> Iterator[ReceivedExemplar]:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.histogram.data_points:
                    for each in point.exemplars:
                        yield ReceivedExemplar(
                            metric.name, each.trace_id.hex(), each.span_id.hex(), each.as_double
                        )


def _values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


def conventional_attributes() -> frozenset[str]:
    """Return the attributes that OpenTelemetry's semantic conventions define."""
    found: set[str] = set()
    for package in (attributes, incubating):
        for module in pkgutil.iter_modules(package.__path__):
            constants = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
            found |= {value for name, value in constants.items() if name.isupper() and isinstance(value, str)}
    return frozenset(found)


def outside_scheme(receiver: OtlpReceiver) -> list[str]:
    """Return what the services have exported under names that are neither declared nor conventional."""
    conventional = conventional_attributes()

    def known(attribute: str) -> bool:
        return attribute in conventional or is_own_attribute(attribute)

    found = []
    for span in receiver.spans:
        if span.scope.startswith(OWN_SCOPE):
            found += [] if is_span(span.name) else [f"span {span.name}"]
            found += [f"{key} of the span {span.name}" for key in span.attributes if not known(key)]
    for metric in receiver.metrics:
        if metric.scope.startswith(OWN_SCOPE):
            declared = DECLARED.get(metric.name)
            if declared is None or declared.unit != metric.unit:
                found.append(f"metric {metric.name} in {metric.unit}")
            elif surplus := metric.attributes - set(declared.attributes):
                found.append(f"{sorted(surplus)} of the metric {metric.name}")
    return sorted(set(found))
