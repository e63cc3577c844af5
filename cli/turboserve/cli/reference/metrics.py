"""The table of metrics, from the instruments that the services create."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY

from turboserve.cli.reference.text import rows

SERVICES = {
    "gateway": "turboserve.gateway",
    "scheduler": "turboserve.scheduler",
    "autoscaler": "turboserve.autoscaler",
    "worker": "turboserve.worker",
    "state-store": "turboserve.state_store",
    "all": "turboserve.bus",
}
"""Name in the table → package."""


_MEASURE = {"create_histogram": "record", "create_gauge": "set"}
"""Kind of instrument → method that takes a value, if that is not `add`."""


class Instrument(NamedTuple):
    """An instrument that a service created."""

    kind: str
    """Name of the method of `Meter` that creates it."""
    name: str
    unit: str
    description: str


class _Recorder(metrics.NoOpMeter):
    """A meter that records which instruments are created."""

    def __init__(self, created: list[Instrument]) -> None:
        super().__init__("reference")
        self._created = created

    def _note(self, kind: str, name: str, unit: str = "", description: str = "") -> None:
        self._created.append(Instrument(kind, name, unit, description))

    def create_counter(self, name: str, unit: str = "", description: str = "") -> metrics.Counter:
        self._note("create_counter", name, unit, description)
        return super().create_counter(name)

    def create_up_down_counter(
        self, name: str, unit: str = "", description: str = ""
    ) -> metrics.UpDownCounter:
        self._note("create_up_down_counter", name, unit, description)
        return super().create_up_down_counter(name)

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Any:
        self._note("create_gauge", name, unit, description)
        return super().create_gauge(name)

    def create_histogram(
        self, name: str, unit: str = "", description: str = "", **_options: Any
    ) -> metrics.Histogram:
        self._note("create_histogram", name, unit, description)
        return super().create_histogram(name)

    def create_observable_gauge(
        self, name: str, callbacks: Any = None, unit: str = "", description: str = ""
    ) -> metrics.ObservableGauge:
        # An observable gauge has the same name at `/metrics` as a gauge.
        self._note("create_gauge", name, unit, description)
        return super().create_observable_gauge(name)


class _Provider(metrics.MeterProvider):
    def __init__(self) -> None:
        self.created: defaultdict[str, list[Instrument]] = defaultdict(list)
        """Meter's name → instruments in the order of creation."""

    def get_meter(self, name: str, *_args: Any, **_options: Any) -> metrics.Meter:
        return _Recorder(self.created[name])


def _modules(package: str) -> Iterator[str]:
    """Yield the modules of a package that create instruments.

    They are found by their text: an import of every module would need the optional packages, such as Ray.
    """
    [folder] = importlib.import_module(package).__path__
    for file in sorted(Path(folder).rglob("*.py")):
        source = file.read_text()
        if "turboserve.telemetry import" in source and "meter(" in source:
            yield ".".join((package, *file.relative_to(folder).with_suffix("").parts))


def instruments() -> dict[str, list[Instrument]]:
    """Return the instruments of each service, and those that all services have.

    Call it in its own process, since OpenTelemetry takes one provider per process.
    """
    provider = _Provider()
    metrics.set_meter_provider(provider)
    for package in SERVICES.values():
        for module in _modules(package):
            imported = importlib.import_module(module)
            for name in getattr(imported, "GAUGES", {}):
                imported.observe(name, float)
    return {service: _created_by(provider, package) for service, package in SERVICES.items()}


def _created_by(provider: _Provider, package: str) -> list[Instrument]:
    """Return the instruments of the meters that are named after a package or a part of it."""
    return [
        instrument
        for name, created in provider.created.items()
        if name == package or name.startswith(f"{package}.")
        for instrument in created
    ]


def families(created: list[Instrument]) -> list[tuple[str, str, str]]:
    """Return (name, type, description) of each instrument as the exporter shows it at `/metrics`."""
    provider = MeterProvider([PrometheusMetricReader()], shutdown_on_exit=False)
    meter = provider.get_meter("reference")
    found: dict[str, tuple[str, str, str]] = {}
    for kind, name, unit, description in created:
        instrument = getattr(meter, kind)(name, unit=unit, description=description)
        getattr(instrument, _MEASURE.get(kind, "add"))(1)
        for family in REGISTRY.collect():
            exported = family.samples[0].name if family.type == "counter" else family.name
            if exported.startswith("turboserve"):
                found.setdefault(exported, (exported, family.type, description))
    provider.shutdown()
    return list(found.values())


def markdown() -> str:
    """Return the table of the documentation."""
    lines = []
    for service, created in instruments().items():
        for name, kind, meaning in families(created):
            lines.append((f"`{name}`", service, kind, meaning))
    return rows(("metric", "service", "type", "meaning"), lines)
