"""Which slots are wanted, given how many."""

from __future__ import annotations

from turboserve.autoscaler.slots import KEEPABLE, Slot
from turboserve.contracts.pool import SlotPhase

LARGEST = 4_096
"""Workers in one pool, at most."""

_COST = {
    SlotPhase.VACANT: 0,
    SlotPhase.BACKING_OFF: 1,
    SlotPhase.RELEASING: 1,
    SlotPhase.RESERVING: 2,
    SlotPhase.LAUNCHING: 3,
    SlotPhase.LOADING: 4,
}


def fit(slots: dict[str, Slot], target: int, pool: str, now: float) -> None:
    """Make exactly `target` slots wanted, adding slots with the lowest free index where needed."""
    wanted = [slot for slot in slots.values() if slot.wanted]
    surplus = len(wanted) - target
    if surplus > 0:
        for slot in sorted(wanted, key=_least_missed)[:surplus]:
            slot.wanted = False
    for _ in range(-surplus):
        again = [s for s in slots.values() if not s.wanted and not s.sealed and s.phase in KEEPABLE]
        if again:
            min(again, key=lambda slot: slot.index).wanted = True
            continue
        index = next(i for i in range(len(slots) + 1) if f"{pool}-{i}" not in slots)
        slot = Slot(f"{pool}-{index}", index, since=now)
        slots[slot.name] = slot


def _least_missed(slot: Slot) -> tuple[int, int, int]:
    """Which slot to give up first: one without a worker, then the one with the fewest sessions."""
    return _COST.get(slot.phase, 5), slot.held, -slot.index
