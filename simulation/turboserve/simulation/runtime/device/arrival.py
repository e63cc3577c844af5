"""A state that arrives in its slab layer by layer, on a virtual device's clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch

from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.contents import VirtualState, virtual
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.layer_arrival import LayerArrival
from turboserve.worker.engine.state import SessionState


class VirtualArrival(LayerArrival):
    """See `LayerArrival`. The layers arrive at equal distances of time."""

    def __init__(self, session: str, layers: int, clock: DeviceClock) -> None:
        super().__init__(session, layers, torch.device("cpu"))
        self._number, self._clock = layers, clock
        self._begins_at = self._ends_at = math.inf

    def takes(self, began: float, ends: float) -> None:
        """Note that the copy begins at `began` and ends at `ends`."""
        self._begins_at, self._ends_at = began + (ends - began) / self._number, ends
        self._clock.wake_at(self._begins_at)

    @property
    def begun(self) -> bool:
        """See `LayerArrival.begun`."""
        return self._clock.now >= self._begins_at

    @property
    def complete(self) -> bool:
        """See `LayerArrival.complete`."""
        return self._clock.now >= self._ends_at

    def wait_s(self, forward_s: float) -> float:
        """Return the time for which a forward that begins now waits for layers, seconds.

        All layers take the same time. So the forward waits for the first one or for the last one.
        """
        after_last_s = forward_s / self._number
        return max(0.0, self._ends_at + after_last_s - (self._clock.now + forward_s))


class _Ring:
    """In the place of a state's ring: knows only which layers have arrived."""

    def __init__(self, arrival: VirtualArrival) -> None:
        self.arrival: VirtualArrival | None = arrival

    def has_arrived(self) -> None:
        """See `KVRing.has_arrived`."""
        self.arrival = None


def arrives(state: SessionState, layers: int, clock: DeviceClock) -> VirtualArrival | None:
    """Let the layers of a state arrive one after the other. None: it has one, and arrives as a whole."""
    if layers < 2:
        return None
    arrival = VirtualArrival(state.session, layers, clock)
    state.ring = cast(KVRing, _Ring(arrival))
    return arrival


def arrival_of(state: SessionState) -> VirtualArrival | None:
    """Return how the layers of a state arrive; None if the engine knows that all are there."""
    ring: object = state.ring
    return ring.arrival if isinstance(ring, _Ring) else None


def layers_wait_s(states: Iterable[SessionState], forward_s: float) -> float:
    """Return the time for which a forward of these states, which begins now, waits for layers, seconds."""
    arriving = (found for state in states if (found := arrival_of(state)) is not None)
    return max((each.wait_s(forward_s) for each in arriving), default=0.0)


def whole(state: SessionState) -> VirtualState:
    """Return the state. Raises RuntimeError if a layer of it is still to arrive."""
    arrival = arrival_of(state)
    if arrival is not None and not arrival.complete:
        raise RuntimeError(f"{state.session}: layers are read that have not arrived")
    return virtual(state)
