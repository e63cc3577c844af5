"""The room of workers that serve several classes, in sessions of one of them.

A worker's sessions of the other classes leave n_c − n_c Σ x_j / n_j slots of class c. Sessions of the others
that wait for a slot come first: each takes as many slots of class c as on the worker where it takes most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from turboserve.allocation.slots import slots_used


@dataclass(frozen=True)
class SharedWorker:
    """A worker that serves several classes."""

    served: Mapping[str, int]
    """n_j by class."""
    held: Mapping[str, int]
    """Sessions that hold a slot, or reserve one by migrating, by class."""


@dataclass(frozen=True)
class SharedRoom:
    """The slots for a class of workers that serve several."""

    slots: int
    """Slots of workers that run. It may be below 0 (`class_capacity`)."""
    coming: int
    """Number of workers that pools may add."""
    largest: int
    """Slots of one such worker."""

    @property
    def with_coming(self) -> int:
        return self.slots + self.coming * self.largest


NONE: Mapping[str, int] = {}


def class_capacity(
    model: str, workers: Iterable[SharedWorker], waiting: Mapping[str, int], largest: Mapping[str, int] = NONE
) -> int:
    """Return the slots for sessions of a class, those in use included. It is exact for a single class.

    Below 0: sessions of other classes wait that take slots of further workers, too.

    `workers`: those that serve the class. `waiting`: sessions without a slot that want one, by class.
    `largest`: n_j of a worker that a pool may still start, by class. Sessions may wait for it.
    """
    slots = 0
    own = largest.get(model, 0)
    dearest = {name: Fraction(own, alone) for name, alone in largest.items() if name != model and alone}
    for worker in workers:
        served = worker.served.get(model, 0)
        others = {name: count for name, count in worker.held.items() if name != model and count}
        slots += max(0, served - slots_used(worker.served, model, others))
        for name, alone in worker.served.items():
            if name != model and alone:
                dearest[name] = max(dearest.get(name, Fraction(0)), Fraction(served, alone))
    ahead = sum((waiting.get(name, 0) * cost for name, cost in dearest.items()), Fraction(0))
    return slots - ceil(ahead)
