"""Which workers are paid for, from launch to end: what the pool tells the state store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from turboserve.autoscaler.slots import Slot
from turboserve.contracts.cost import Rental


@dataclass
class _Rent:
    slot: str
    launched_at: float
    ready_at: float | None = None
    ended_at: float | None = None


class Rents:
    """Every worker that is in a slot, and those that were and whose end is not acknowledged. Times are the
    core's monotonic ones, and go out as ages: the store has a clock of its own."""

    def __init__(self, kind: str | None, gpus: float) -> None:
        self._kind, self._gpus = kind, gpus
        self._rents: dict[str, _Rent] = {}
        self.start_up_s: float | None = None
        """How long the last worker took from its launch to being ready."""

    def look(self, slots: Iterable[Slot], now: float) -> None:
        """Take note of who is there; whoever was there before has ended by `now`."""
        there = set()
        for slot in slots:
            if slot.worker is None:
                continue
            there.add(slot.worker)
            rent = self._rents.setdefault(slot.worker, _Rent(slot.name, slot.launched_at))
            if rent.ready_at is None and slot.ready_at is not None:
                rent.ready_at = slot.ready_at
                if not slot.adopted:
                    self.start_up_s = slot.ready_at - slot.launched_at
        for worker, rent in self._rents.items():
            if worker not in there and rent.ended_at is None:
                rent.ended_at = now

    def rentals(self, now: float) -> tuple[Rental, ...]:
        """All of them as of `now`."""
        return tuple(
            Rental(
                worker=worker,
                slot=rent.slot[:64],
                kind=self._kind,
                gpus=self._gpus,
                age_s=max(now - rent.launched_at, 0.0),
                ready_ago_s=None if rent.ready_at is None else max(now - rent.ready_at, 0.0),
                ended_ago_s=None if rent.ended_at is None else max(now - rent.ended_at, 0.0),
            )
            for worker, rent in self._rents.items()
        )

    def acknowledged(self, rentals: Iterable[Rental]) -> None:
        """The store has these: ends among them need not be told again."""
        for rental in rentals:
            if rental.ended_ago_s is not None:
                self._rents.pop(rental.worker, None)
