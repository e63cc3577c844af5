"""The registry of metrics: each instrument of the services is created here, with a name in the scheme."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from opentelemetry import metrics

from turboserve.telemetry_names import check_metric

Source = TypeVar("Source")


@dataclass(frozen=True)
class Instrument:
    """The declaration of an instrument."""

    kind: str
    """counter, up_down_counter, histogram, gauge."""
    name: str
    unit: str
    """UCUM: `s`, `By`, `1` for a share, `{thing}` for a number of things."""
    description: str
    attributes: tuple[str, ...]
    """Every attribute that its values may have."""


REGISTRY: dict[str, Instrument] = {}
"""Name → every instrument of the modules that this process has imported."""


_PLAIN_COUNTERS: list[metrics.Counter] = []
"""The counters without attributes."""


def export_zeros() -> None:
    """Export the counters without attributes from now on, also those that have counted nothing yet.

    A series that begins with its first event shows no increase to Prometheus. Call this once, when the
    provider of metrics is installed.
    """
    for counter in _PLAIN_COUNTERS:
        counter.add(0)


class SetGauge(Protocol):
    """A gauge that keeps the value that was set last."""

    def set(self, amount: float, attributes: dict[str, str] | None = None) -> None:
        """Set the value that has these attributes."""


READS = 5
"""Attempts to read a source that another thread changes meanwhile."""

Observed = float | Mapping[str, float] | Mapping[tuple[str, ...], float] | None
"""What a source shows: one value, one value for each value of the gauge's attributes, or none."""


class ObservedGauge:
    """A gauge that is read at every export of metrics, from the sources that still exist.

    A gauge holds weak references to its sources, because an instrument lives as long as the process.
    """

    def __init__(
        self, meter: metrics.Meter, name: str, unit: str, description: str, *attributes: str
    ) -> None:
        """`attributes`: distinguish the values of one source. None: a source has one value."""
        self._sources: weakref.WeakKeyDictionary[Any, Callable[[Any], Observed]]
        self._sources = weakref.WeakKeyDictionary()
        self._attributes = attributes
        meter.create_observable_gauge(name, callbacks=[self._observe], unit=unit, description=description)

    def add(self, source: Source, read: Callable[[Source], Observed]) -> None:
        """Export what `source` shows from now on.

        `read` returns it, or None while the source shows nothing. It must not refer to the source itself. For
        a gauge with attributes, it returns a mapping from their values to the gauge's. A key is a tuple where
        there are several attributes.
        """
        self._sources[source] = read

    def _observe(self, _options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        found: list[metrics.Observation] = []
        # An exporter may have a thread of its own. This makes a list at once, and `items` does not.
        for reference in self._sources.keyrefs():
            source = reference()
            read = None if source is None else self._sources.get(source)
            if read is not None:
                found += self._read(source, read)
        return found

    def _read(self, source: Source, read: Callable[[Source], Observed]) -> list[metrics.Observation]:
        for _ in range(READS - 1):
            # A collection whose size another thread changes ends an iteration with this error.
            with suppress(RuntimeError):
                return self._shown(read(source))
        return self._shown(read(source))

    def _shown(self, shown: Observed) -> list[metrics.Observation]:
        if isinstance(shown, Mapping):
            found = []
            for key, value in shown.items():
                values = (key,) if isinstance(key, str) else key
                attributes = dict(zip(self._attributes, values, strict=True))
                # A condition is a bool, which the exporter of OTLP does not take.
                found.append(metrics.Observation(float(value), attributes))
            return found
        return [] if shown is None else [metrics.Observation(shown)]


class Instruments:
    """Creates the instruments of one component, and registers them.

    Every method raises TelemetryNameError for a name or a unit outside the scheme.
    """

    def __init__(self, component: str) -> None:
        """`component` is one of `telemetry_names.COMPONENTS`."""
        self._meter = metrics.get_meter(f"turboserve.{component}")

    def counter(self, name: str, unit: str, description: str, *attributes: str) -> metrics.Counter:
        """Create a sum that only grows."""
        _register("counter", name, unit, description, attributes)
        counter = self._meter.create_counter(name, unit=unit, description=description)
        if not attributes:
            _PLAIN_COUNTERS.append(counter)
        return counter

    def up_down_counter(
        self, name: str, unit: str, description: str, *attributes: str
    ) -> metrics.UpDownCounter:
        """Create a sum that also falls."""
        _register("up_down_counter", name, unit, description, attributes)
        return self._meter.create_up_down_counter(name, unit=unit, description=description)

    def histogram(
        self,
        name: str,
        unit: str,
        description: str,
        *attributes: str,
        buckets: Sequence[float] | None = None,
    ) -> metrics.Histogram:
        """Create a distribution. `buckets`: upper bounds, in `unit`; None: OpenTelemetry's own."""
        _register("histogram", name, unit, description, attributes)
        return self._meter.create_histogram(
            name, unit=unit, description=description, explicit_bucket_boundaries_advisory=buckets
        )

    def gauge(self, name: str, unit: str, description: str, *attributes: str) -> SetGauge:
        """Create a value that is set."""
        _register("gauge", name, unit, description, attributes)
        return self._meter.create_gauge(name, unit=unit, description=description)

    def observed_gauge(self, name: str, unit: str, description: str, *attributes: str) -> ObservedGauge:
        """Create a value that is read at every export. `attributes`: see `ObservedGauge`."""
        _register("gauge", name, unit, description, attributes)
        return ObservedGauge(self._meter, name, unit, description, *attributes)


def _register(kind: str, name: str, unit: str, description: str, attributes: tuple[str, ...]) -> None:
    check_metric(name, unit)
    declared = Instrument(kind, name, unit, description, attributes)
    if REGISTRY.setdefault(name, declared) != declared:
        raise ValueError(f"metric {name!r} is declared twice")
