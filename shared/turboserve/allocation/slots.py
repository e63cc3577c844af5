"""Slots of a worker that serves several classes, counted in sessions of one of them.

A worker serves n_j sessions of class j alone. A session of class j is then 1 / n_j of the worker, and takes
n_c / n_j slots of class c. All sums are exact. With one class, slots are numbers of sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm


def slots_used(served: Mapping[str, int], one: str, counts: Mapping[str, int]) -> int:
    """Return how many slots of the class `one` these sessions use: n_c Σ x_j / n_j, rounded up.

    `served`: n_j by class. `counts`: x_j by class. So another session of the class fits, Σ x_j / n_j ≤ 1 with
    it, if and only if the result is below n_c. A session of a class that the worker does not serve takes one
    slot. One of a class with n_j = 0 takes all slots: the worker reports n_j without the sessions that are
    paused in their slabs, and one of these has been resumed.
    """
    return SlotUnits(served).used(one, counts)


class SlotUnits:
    """Slots of one worker in integers: it has lcm(n_j) units, and a session of class j takes lcm / n_j."""

    def __init__(self, served: Mapping[str, int]) -> None:
        """`served`: n_j by class."""
        self._served = dict(served)
        self.whole = lcm(*(alone for alone in served.values() if alone))
        """Units of a slot, whatever its class: n_c sessions of class c take n_c slots."""
        self._units = {name: self.whole // (alone or 1) for name, alone in served.items()}

    def of(self, one: str, counts: Mapping[str, int]) -> int:
        """Return the slots of the class `one` that all these sessions use, times `whole`. It is exact."""
        alone, units = self._served.get(one, 0), 0
        for name, count in counts.items():
            if name == one or name not in self._units:
                units += count * self.whole
            else:
                units += count * alone * self._units[name]
        return units

    def used(self, one: str, counts: Mapping[str, int]) -> int:
        """Return the slots of the class `one` that all these sessions use, rounded up."""
        return -(-self.of(one, counts) // self.whole)

    def taken(self, one: str, counts: Mapping[str, int]) -> int:
        """Return the slots of the class `one` that sessions of the others take, rounded up."""
        return self.used(one, counts) - counts.get(one, 0)
