"""The tables of metrics and attributes, from what the services declare."""

from __future__ import annotations

import importlib

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY as PROMETHEUS

from turboserve.cli.tables import Cell, Code, Table
from turboserve.instruments import REGISTRY, Instrument
from turboserve.telemetry_names import ATTRIBUTES, COMPONENTS

DECLARED_IN = (
    "turboserve.gateway.metrics",
    "turboserve.scheduler.metrics",
    "turboserve.autoscaler.metrics",
    "turboserve.worker.metrics",
    "turboserve.state_store.metrics",
    "turboserve.recorder.metrics",
    "turboserve.webhooks.metrics",
    "turboserve.bus.unreadable",
    "turboserve.service",
)
"""The modules that declare the instruments of all services."""

_MEASURE = {"histogram": "record", "gauge": "set"}
"""Kind of instrument → method that takes a value, if that is not `add`."""


def instruments() -> list[Instrument]:
    """Return the instruments of all services, in the order of `COMPONENTS`."""
    for module in DECLARED_IN:
        importlib.import_module(module)
    order = list(COMPONENTS)
    return sorted(REGISTRY.values(), key=lambda instrument: order.index(component(instrument)))


def component(instrument: Instrument) -> str:
    """Return the component that declares an instrument."""
    return instrument.name.split(".")[1]


def exported(instrument: Instrument) -> tuple[str, str]:
    """Return the name and the type that the exporter gives to an instrument at `/metrics`."""
    provider = MeterProvider([PrometheusMetricReader()], shutdown_on_exit=False)
    create = getattr(provider.get_meter("reference"), f"create_{instrument.kind}")
    created = create(instrument.name, unit=instrument.unit, description=instrument.description)
    getattr(created, _MEASURE.get(instrument.kind, "add"))(1)
    try:
        for family in PROMETHEUS.collect():
            name = family.samples[0].name if family.type == "counter" else family.name
            if name.startswith("turboserve"):
                return name, family.type
    finally:
        provider.shutdown()
    raise LookupError(f"{instrument.name} is not exported")


def metrics_table() -> Table:
    """Return the table of metrics."""
    lines: list[tuple[Cell, ...]] = []
    for instrument in instruments():
        name, kind = exported(instrument)
        service = COMPONENTS[component(instrument)]
        described = (service, kind, tuple(instrument.attributes), instrument.description)
        lines.append((Code(instrument.name), Code(name), *described))
    return Table.of(("metric", "at `/metrics`", "service", "type", "attributes", "meaning"), lines)


def attributes_table() -> Table:
    """Return the table of the attributes that are not OpenTelemetry's."""
    lines = [(Code(name), meaning) for name, meaning in ATTRIBUTES.items()]
    return Table.of(("attribute", "meaning"), lines)
