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
        self._entries: Mapping[str, SessionEntry] = {}
        self._incoming: IncomingMigrations | None = None

    def counts(self, entries: Mapping[str, SessionEntry], incoming: IncomingMigrations) -> None:
        """Set the sessions that are counted: those of the table, and those that arrive."""
        self._entries, self._incoming = entries, incoming

    def free(self, model: str) -> int:
        """Number of further sessions of a class that fit. Not above 0: none."""
        held = Counter(entry.record.model for entry in self._entries.values() if entry.takes_slot)
        held.update(arrival.record.model for arrival in self._incoming or () if arrival.takes_slot)
        return self.served.get(model, 0) - slots_used(self.served, model, held)

    def paused(self, model: str) -> int:
        """Number of sessions of a class that should be on the host but do not fit there."""
        return sum(entry.paused_in_slab for entry in self._entries.values() if entry.record.model == model)
