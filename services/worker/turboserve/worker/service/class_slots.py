"""Slots of a worker that serves several classes of sessions. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from turboserve.allocation.slots import slots_used
from turboserve.worker.service.session_entry import SessionEntry
from turboserve.worker.service.table_migrations import IncomingMigrations

MediaStarts = Mapping[str, Callable[[int], float]]
"""By class: chunk index → its start, seconds."""
ONE_CLASS: MediaStarts = {}


class ClassSlots:
    """How many sessions of each class fit beside those that hold slots (`turboserve.allocation.slots`)."""

    def __init__(self, served: Mapping[str, int]) -> None:
        """`served`: n_j by class."""
        self.served = served
        self.names = ", ".join(served)
        """The classes, for reasons."""
        self._entries: Mapping[str, SessionEntry] = {}
        self._incoming: IncomingMigrations | None = None

    def counts(self, entries: Mapping[str, SessionEntry], incoming: IncomingMigrations) -> None:
        """Set the sessions that are counted: those of the table, and those that arrive."""
        self._entries, self._incoming = entries, incoming

    def offered(self) -> dict[str, int]:
        """n_j by class, less the slabs of its sessions that should be on the host but do not fit there. The
        worker reports these, and counts by them, as the other services do."""
        paused = Counter(entry.record.model for entry in self._entries.values() if entry.paused_in_slab)
        return {name: max(0, most - paused[name]) for name, most in self.served.items()}

    def free(self, model: str) -> int:
        """Number of further sessions of a class that fit. Not above 0: none."""
        held = Counter(
            entry.record.model
            for entry in self._entries.values()
            if entry.takes_slot and not entry.paused_in_slab
        )
        held.update(arrival.record.model for arrival in self._incoming or () if arrival.takes_slot)
        offered = self.offered()
        return offered.get(model, 0) - slots_used(offered, model, held)


def refusal_of(classes: ClassSlots | None, capacity: int, model: str) -> str:
    """Return why no further session of a class fits. `capacity`: K of a worker that serves one class."""
    if classes is None:
        return f"slots: all {capacity} are in use"
    return f"slots: all are in use on this worker, which serves {classes.offered()[model]} of {model} alone"
