"""The arrival of a state in its slab, layer by layer: what the first forwards wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from turboserve.worker.engine.errors import StateNotArrivedError
from turboserve.worker.engine.streams import DEVICE_LOST


class LayerArrival:
    """Which layers of a state have arrived. The transfer executor writes it, the engine's thread waits.

    A layer has arrived when its copies are done, on a CPU and on a GPU: the transfer waits for each piece. On
    a GPU, the stream of the forward also waits for an event that the executor's stream records after them.
    """

    def __init__(self, session: str, layers: int, device: torch.device) -> None:
        self._session, self._device = session, device
        self._layers = [threading.Event() for _ in range(layers)]
        self._copied: dict[int, torch.cuda.Event] = {}
        self._count = 0
        """Number of layers that have arrived, in order."""
        self._postponed: list[tuple[Callable[[slice], None], set[int]]] = []
        """Changes of the slab, each with the layers that have yet to arrive for it."""
        self._failed = False
        self._error: BaseException | None = None

    @property
    def begun(self) -> bool:
        """Whether the first forward may start: layer 0 is there, and what belongs to no layer."""
        return self._count > 0

    @property
    def complete(self) -> bool:
        """Whether all layers have arrived."""
        return self._count == len(self._layers)

    def arrived(self, layer: int) -> None:
        """Note that the copies of a layer are done, on this thread's CUDA stream where there is one."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._copied[layer] = event
        self._count = layer + 1
        self._layers[layer].set()

    def end(self, error: BaseException | None = None) -> None:
        """Note that no further layer arrives. A forward that waits for one fails.

        `error`: why the copy failed. None: it is complete, or was given up.
        """
        # The reason first: a forward may look at any time.
        self._error = error
        self._failed = not self.complete
        for event in self._layers:
            event.set()

    def wait(self, layer: int) -> None:
        """Let this thread's forward continue with a layer when that has arrived.

        Raises `StateNotArrivedError`, or the copy's own error if the device is lost: the session did not
        cause that.
        """
        self._layers[layer].wait()
        if self._failed:
            if isinstance(self._error, DEVICE_LOST):
                raise self._error
            raise StateNotArrivedError(self._session, layer) from self._error
        if (event := self._copied.get(layer)) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        self._change(layer)

    def postpone(self, change: Callable[[slice], None]) -> None:
        """Make a change of the slab to each layer when a forward continues with it, or by `catch_up`."""
        self._postponed.append((change, set(range(len(self._layers)))))

    def catch_up(self) -> None:
        """Make the postponed changes to the layers that no forward has used. All must have arrived."""
        for layer in range(len(self._layers)):
            self._change(layer)

    def _change(self, layer: int) -> None:
        for change, layers in self._postponed:
            if layer in layers:
                layers.discard(layer)
                change(slice(layer, layer + 1))
