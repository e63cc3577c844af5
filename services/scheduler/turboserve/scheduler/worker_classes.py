"""The classes of one worker in the scheduler's view.

A worker that serves several classes has an entry in the cluster for each of them, `WORKER/CLASS`. An entry's
sessions are those of its class. Those of the other classes take slots of it: a session of class j is 1 / n_j
of the worker, so n_c / n_j slots of class c (`turboserve.allocation.slots`). All decisions about an entry are
then those about a worker that serves one class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from turboserve.allocation.slots import SlotUnits
from turboserve.contracts.worker_offers import ServedClass
from turboserve.scheduler.placement.pool import LatencyCurve
from turboserve.scheduler.profiles import curves_differ, profiles_differ


@dataclass(frozen=True)
class WorkerClasses:
    """The classes of a worker that serves several."""

    served: tuple[ServedClass, ...]
    known: tuple[Mapping[int, float], ...] = ()
    """Profile of each class when the curve through it last changed by more than `NOISE`. Empty: those of
    `served`."""

    @cached_property
    def speed(self) -> tuple[object, ...]:
        """What decides how many sessions the worker can run."""
        return self.capacities, self.known or tuple(one.chunk_latency_s for one in self.served)

    @cached_property
    def _by_model(self) -> dict[str, ServedClass]:
        return {one.model: one for one in self.served}

    @cached_property
    def capacities(self) -> tuple[tuple[str, int], ...]:
        """Class and n_j of each."""
        return tuple((one.model, one.capacity) for one in self.served)

    @cached_property
    def units(self) -> SlotUnits:
        return SlotUnits(dict(self.capacities))

    def of(self, model: str) -> ServedClass | None:
        """Return the class of this name. None: the worker does not serve it."""
        return self._by_model.get(model)

    def taken(self, model: str, counts: Mapping[str, int]) -> int:
        """Return the slots of a class that sessions of the others take. `counts`: all sessions by class."""
        return self.units.taken(model, counts)


def newest_classes(
    reported: tuple[ServedClass, ...] | None, known: WorkerClasses | None, *, late: bool = False
) -> WorkerClasses | None:
    """Return the classes after a report or a row. Profiles that differ by noise alone change nothing.

    A report from the loading phase has no classes, or names them alone, and does not replace known ones.
    `late`: the report is from that phase, or from an earlier process. Otherwise a worker without classes
    serves one alone.
    """
    if reported is None:
        return known if late else None
    if known is not None and not any(one.capacity or one.weights_digest for one in reported):
        return known
    if known is None or [_identity(one) for one in reported] != [_identity(one) for one in known.served]:
        return WorkerClasses(reported)
    pairs = zip(reported, known.served, strict=True)
    if not any(profiles_differ(new.chunk_latency_s, old.chunk_latency_s) for new, old in pairs):
        return known
    curves = known.known or tuple(old.chunk_latency_s for old in known.served)
    return WorkerClasses(reported, tuple(map(_newest_curve, reported, curves)))


def _newest_curve(one: ServedClass, known: Mapping[int, float]) -> Mapping[int, float]:
    profile = one.chunk_latency_s
    return profile if profile and curves_differ(profile, known) else known


def _identity(one: ServedClass) -> tuple[str, int, str | None]:
    return one.model, one.capacity, one.weights_digest


def entry_name(worker: str, model: str) -> str:
    """Return the name of a class's entry. Ids of workers have no slash."""
    return f"{worker}/{model}"


def worker_of(entry: str) -> str:
    """Return the worker of an entry."""
    return entry.partition("/")[0]


def beside(profile: Mapping[int, float], capacity: int, taken: int) -> Mapping[int, float]:
    """Return L(n + `taken`), the profile of a class beside the sessions of other classes.

    `capacity`: n_c. The sessions of the others count as `taken` of the class.
    """
    if not taken:
        return profile
    curve = LatencyCurve(profile, capacity)
    return {n: curve(n + taken) for n in range(1, max(1, capacity - taken) + 1)}
