"""Work of a virtual device: forwards that are only counted, and transfers that take their declared time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from turboserve.simulation.runtime.device.arrival import VirtualArrival
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.contents import Latents, VirtualState, link
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.worker.engine.memory import Extent
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.state_transfer import Transfer, TransferDirection, TransferPurpose
from turboserve.worker.engine.work import ChunkWork


class VirtualChunk(ChunkWork):
    """A chunk's forwards, which are only counted."""

    def __init__(self, state: VirtualState, profile: DeviceProfile, frames: int) -> None:
        self.session, self.state = state.session, state
        self.index = state.next_chunk
        self.done = 0
        steps = profile.denoising if state.fidelity is None else state.fidelity.steps
        self.denoising, self.total = (1, 1) if profile.chunk_at_once else (steps, steps + 1)
        self.forwards = steps + 1 if profile.chunk_at_once else 1
        """Number of real forwards that each of these stands for."""
        self.share = profile.share_of(state.fidelity)
        """Time of a forward at the chunk's configuration, relative to one at the best."""
        self.clean: Tensor | None = None
        self._frames = frames
        self._parent = state.number

    def advance(self, flow: Tensor) -> None:
        """See `Work.advance`."""
        self.done += 1
        if self.done == self.denoising:
            self.clean = Latents(self._parent, link(self._parent, self.index), self.index).tensor


class VirtualPass:
    """Forwards over known latents: a recache or a replay (`work.Work`)."""

    forwards = 1
    share = 1.0

    def __init__(self, session: str, frames: int, total: int) -> None:
        self.session, self._frames = session, frames
        self.done, self.total = 0, total

    @property
    def frames(self) -> int:
        """See `Work.frames`."""
        return self._frames

    def row(self) -> Any:
        """Raise NotImplementedError: a virtual device computes no rows."""
        raise NotImplementedError("a virtual device computes no rows")

    def advance(self, flow: Tensor) -> None:
        """See `Work.advance`."""
        self.done += 1


class VirtualTransfer(Transfer):
    """A state on its way between device and host, which takes its declared time."""

    arrival: VirtualArrival | None

    def __init__(
        self,
        session: str,
        way: TransferDirection,
        snapshot: Snapshot,
        extent: Extent | None,
        seconds: float,
        clock: DeviceClock,
        purpose: TransferPurpose = TransferPurpose.SUSPENSION,
        arrival: VirtualArrival | None = None,
        *,
        fails: bool = False,
    ) -> None:
        """`arrival`: gets the layers. `fails`: the copy ends with an error."""
        super().__init__(session, way, snapshot, extent, {}, {}, purpose)
        self.arrival = arrival
        self._seconds, self._clock, self._fails = seconds, clock, fails

    def run(self) -> None:
        """See `Job.run`."""
        began = self._clock.now
        self._clock.advance(self._seconds)
        if self.arrival is not None:
            self.arrival.takes(began, self._clock.now)
        if self._fails:
            self.error = RuntimeError(f"{self.session}: the virtual copy fails")
