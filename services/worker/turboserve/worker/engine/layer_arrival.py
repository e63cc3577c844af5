"""The arrival of a state in its slab, layer by layer: what the first forwards wait for."""

from __future__ import annotations

import threading

import torch

from turboserve.worker.engine.errors import StateNotArrivedError


class LayerArrival:
    """Which layers of a state have arrived. The transfer executor writes it, the engine's thread waits.

    On a GPU, a layer has arrived for the host when its copy is launched: the stream of the forward waits for
    the copy's event. Elsewhere the thread waits for the copy itself.
    """

    def __init__(self, session: str, layers: int, device: torch.device) -> None:
        self._session, self._device = session, device
        self._layers = [threading.Event() for _ in range(layers)]
        self._copied: dict[int, torch.cuda.Event] = {}
        self._failed = False

    @property
    def begun(self) -> bool:
        """Whether the first forward may start: layer 0 is there, and what belongs to no layer."""
        return self._layers[0].is_set()

    @property
    def complete(self) -> bool:
        """Whether all layers have arrived."""
        return self._layers[-1].is_set()

    def arrived(self, layer: int) -> None:
        """Note that the copies of a layer are done, or launched on this thread's CUDA stream."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._copied[layer] = event
        self._layers[layer].set()

    def end(self) -> None:
        """Note that no further layer arrives. A forward that waits for one fails."""
        self._failed = not self.complete
        for event in self._layers:
            event.set()

    def wait(self, layer: int) -> None:
        """Let this thread's forward continue with a layer when that has arrived. Raises
        `StateNotArrivedError`."""
        self._layers[layer].wait()
        if self._failed:
            raise StateNotArrivedError(self._session, layer)
        if (event := self._copied.get(layer)) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
