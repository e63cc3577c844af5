"""A backend whose chunks other workers decode, or whose prompts other workers encode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from turboserve.simulation.runtime.device.arrival import whole
from turboserve.simulation.runtime.device.backend import VirtualBackend, VirtualReplica
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.decoding import (
    DecodeThread,
    VirtualDecoder,
    VirtualDecodingApart,
    VirtualTextEncoder,
    WaitingExecutor,
    embedding_of,
)
from turboserve.simulation.runtime.device.faults import DeviceFaults
from turboserve.simulation.runtime.device.pages import VirtualBuffer
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.worker.engine.backend import Decoded, Decoding, JobExecutor
from turboserve.worker.engine.decode_jobs import CacheApart
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import EngineOptions
from turboserve.worker.engine.memory import Extent, Slab
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.state_transfer import Transfer
from turboserve.worker.engine.streams import Wakeup


class ApartReplica(VirtualReplica):
    """See `backend.Replica`."""

    def __init__(
        self,
        profile: DeviceProfile,
        clock: DeviceClock,
        loop: asyncio.AbstractEventLoop,
        faults: DeviceFaults,
        thread: DecodeThread,
    ) -> None:
        """`thread`: waits for decode workers."""
        super().__init__(profile, clock, loop, faults)
        self._thread = thread

    def backend(self, options: EngineOptions) -> ApartBackend:
        """See `Replica.backend`."""
        return ApartBackend(self._profile, options, self._clock, self._loop, self._faults, self._thread)


class ApartBackend(VirtualBackend):
    """See `backend.Backend`. Embeddings of prompts are tensors, and so are latents on their way."""

    def __init__(
        self,
        profile: DeviceProfile,
        options: EngineOptions,
        clock: DeviceClock,
        loop: asyncio.AbstractEventLoop,
        faults: DeviceFaults,
        thread: DecodeThread,
    ) -> None:
        """Create a backend. Raises `BudgetTooSmallError`."""
        super().__init__(profile, options, clock, loop, faults)
        self._thread = thread
        self.text = VirtualTextEncoder(self.config, LatencyProfile(profile.text_s), self.compute)
        self.apart: VirtualDecodingApart | None = None
        if options.decode_apart:
            decoder = VirtualDecoder(self.config, profile.decode_s[1], self._compute_aside)
            self.apart = VirtualDecodingApart(decoder, self.device, torch.uint8)

    def _compute_aside(self, seconds: float) -> None:
        """As `compute`, beside the engine."""
        # The calls of other threads are not in inference mode meanwhile.
        with torch.inference_mode(False):
            self._thread.compute(seconds * self._faults.slowdown)
        self.compute(0.0)

    def executor(self, name: str, wakeup: Wakeup) -> JobExecutor[Any]:
        """See `Backend.executor`."""
        if self.apart is not None and name == "decode":
            return WaitingExecutor(self._thread, self._loop, wakeup)
        return super().executor(name, wakeup)

    def arrive(self, snapshot: Snapshot, slab: Slab, extent: Extent | None) -> tuple[SessionState, Transfer]:
        """See `Backend.arrive`."""
        state, transfer = super().arrive(snapshot, slab, extent)
        if self.apart is not None and state.decoder_cache is not None:
            state.decoder_cache = CacheApart()
        return state, transfer

    def set_prompt(self, state: SessionState, prompt: str, text: Tensor) -> None:
        """See `Backend.set_prompt`. An embedding of another prompt raises an error."""
        if not torch.equal(text, embedding_of(prompt, self.config)):
            raise RuntimeError(f"{state.session}: the embedding is of another prompt")
        super().set_prompt(state, prompt, text)

    def decode(self, batch: Sequence[Decoding]) -> list[Decoded]:
        """See `Backend.decode`."""
        if self.apart is None:
            return super().decode(batch)
        self._harm(each.session.name for each in batch)
        for each in batch:
            whole(each.session.state)
        return self.apart(batch)

    def receive_buffer(self, *, on_host: bool, cell: bool = False) -> VirtualBuffer:
        """See `Backend.receive_buffer`."""
        buffer = super().receive_buffer(on_host=on_host, cell=cell)
        buffer.apart = self.apart is not None
        return buffer
