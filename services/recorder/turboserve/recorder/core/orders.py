"""What changes between two listings of orders. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from turboserve.contracts.recordings import RecordingOrder, RecordingState


@dataclass(frozen=True)
class Plan:
    """Commands for the recordings of a listing."""

    start: tuple[RecordingOrder, ...] = ()
    """Recordings to write from now on."""
    update: tuple[RecordingOrder, ...] = ()
    """Orders of recordings that are being written."""
    stop: tuple[str, ...] = ()
    """Recordings that are being written and are no longer ordered."""
    delete: tuple[RecordingOrder, ...] = ()
    """Recordings whose content goes. None of them is being written."""


def plan(orders: Sequence[RecordingOrder], writing: Collection[str], deleting: Collection[str]) -> Plan:
    """Compare a complete listing with the recordings that are being written or deleted."""
    wanted = {order.recording: order for order in orders if order.state is not RecordingState.DELETING}
    doomed = {order.recording: order for order in orders if order.state is RecordingState.DELETING}
    return Plan(
        start=tuple(order for name, order in wanted.items() if name not in writing),
        update=tuple(order for name, order in wanted.items() if name in writing),
        stop=tuple(sorted(name for name in writing if name not in wanted)),
        delete=tuple(order for name, order in doomed.items() if name not in writing and name not in deleting),
    )
