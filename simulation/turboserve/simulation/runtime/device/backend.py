"""A backend without tensors: states are numbers, and each computation takes its declared time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from turboserve.simulation.runtime.device.arrival import arrives, layers_wait_s, whole
from turboserve.simulation.runtime.device.clock import DeviceClock, VirtualStreamExecutor
from turboserve.simulation.runtime.device.contents import (
    LOST,
    Embedding,
    Latents,
    VirtualState,
    begin,
    latents_of,
    link,
    virtual,
)
from turboserve.simulation.runtime.device.faults import DeviceFaults
from turboserve.simulation.runtime.device.loans import VirtualLoans
from turboserve.simulation.runtime.device.pages import (
    VirtualBuffer,
    pages_of_tensors,
    restore,
    state_size,
    tensors_of,
)
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.device.work import VirtualChunk, VirtualPass, VirtualTransfer
from turboserve.worker.engine.backend import Decoded, Decoding, JobExecutor
from turboserve.worker.engine.context_forwards import ReplayPart
from turboserve.worker.engine.control_encoder import ControlEncoder
from turboserve.worker.engine.errors import HostPoolFullError
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import EngineOptions, Rebuild, SessionSpec, TextEncoder
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import Extent, HostPool, Slab, SlabLayout, SlabPool
from turboserve.worker.engine.rebuild import check_rebuild, plan_rebuild
from turboserve.worker.engine.session import DecoderContext, Session
from turboserve.worker.engine.snapshot import Snapshot, header_of, state_fingerprint
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.state_pages import Page
from turboserve.worker.engine.state_transfer import Transfer, TransferDirection, TransferPurpose
from turboserve.worker.engine.streams import DEVICE_LOST, Wakeup
from turboserve.worker.engine.work import ChunkWork, Work

DTYPE = torch.float32
_fingerprint = cache(state_fingerprint)
_COMPUTED = cast(Tensor, Embedding())
"""Result of a forward. Its contents are never read."""
_NOTHING: Any = None


class VirtualReplica:
    """See `backend.Replica`."""

    def __init__(
        self,
        profile: DeviceProfile,
        clock: DeviceClock,
        loop: asyncio.AbstractEventLoop,
        faults: DeviceFaults,
    ) -> None:
        self._profile, self._clock, self._loop, self._faults = profile, clock, loop, faults

    def backend(self, options: EngineOptions) -> VirtualBackend:
        """See `Replica.backend`."""
        return VirtualBackend(self._profile, options, self._clock, self._loop, self._faults)


class _Text:
    """See `interface.TextEncoder`."""

    weight_bytes = 0
    workspace_bytes = 0

    def __init__(self, backend: VirtualBackend, profile: LatencyProfile) -> None:
        self._backend, self._profile = backend, profile

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """See `TextEncoder.encode`."""
        self._backend.compute(self._profile(len(prompts)))
        return cast(Tensor, [Embedding() for _ in prompts])


class VirtualBackend:
    """See `backend.Backend`."""

    def __init__(
        self,
        profile: DeviceProfile,
        options: EngineOptions,
        clock: DeviceClock,
        loop: asyncio.AbstractEventLoop,
        faults: DeviceFaults,
    ) -> None:
        """Create a backend. Raises `BudgetTooSmallError`."""
        self.config, self.fingerprint = profile.config, _fingerprint(profile.config, profile.weights)
        self.device = torch.device("cpu")
        self.text: TextEncoder = _Text(self, LatencyProfile(profile.text_s))
        self.controls: ControlEncoder | None = None
        self.pool = SlabPool(SlabLayout.of(self.config, DTYPE), options.slab_bytes, self.device)
        self.state_host_bytes = state_size(profile)
        cells = options.host_sessions + 1 if options.host_sessions else 0
        self.host = HostPool(options.host_bytes, False, cells, self.state_host_bytes)
        self._forward = LatencyProfile(profile.forward_s)
        self._recache = LatencyProfile(profile.recache_s)
        self._decode = LatencyProfile(profile.decode_s)
        self._profile, self._clock, self._loop, self._faults = profile, clock, loop, faults
        self.parallel = VirtualLoans(self.compute, profile.parallel_share)
        self._copy_s = self.state_host_bytes / profile.host_bytes_per_s

    @property
    def split(self) -> bool:
        """See `Backend.split`."""
        return self.parallel.split

    def compute(self, seconds: float) -> None:
        """Let the time of a computation pass. Raises `DEVICE_LOST` if the device is lost."""
        if self._faults.lost:
            self._faults.failed = True
            raise DEVICE_LOST[0]("the virtual device is lost")
        self._clock.advance(seconds * self._faults.slowdown)

    def executor(self, name: str, wakeup: Wakeup) -> JobExecutor[Any]:
        """See `Backend.executor`."""
        return VirtualStreamExecutor(self._clock, self._loop, wakeup, self._profile.overlaps)

    # States

    def fresh(self, spec: SessionSpec, slab: Slab) -> VirtualState:
        """See `Backend.fresh`."""
        state = VirtualState.begin(spec, slab, cast(KVRing, _NOTHING), _NOTHING)
        state.number = begin(spec.seed)
        return state

    def end_frame(self, state: SessionState) -> int | None:
        """See `Backend.end_frame`. It is declared for each session."""
        chunks = self._profile.chunks_of.get(state.seed)
        return None if chunks is None else chunks * self.config.frames_per_chunk

    def check(self, rebuild: Rebuild) -> None:
        """See `Backend.check`."""
        check_rebuild(rebuild, self.config)

    def rebuild(self, session: Session, rebuild: Rebuild) -> None:
        """See `Backend.rebuild`.

        Without the newest chunk's latents, the session continues from another state.
        """
        state = virtual(session.state)
        kept = latents_of(rebuild.latents, self.config.frames_per_chunk)
        follows = kept[-1].index == rebuild.next_chunk - 1
        state.number = kept[-1].number if follows else link(LOST, rebuild.next_chunk)
        plan_rebuild(session, rebuild, [each.tensor for each in kept], None, self.config)
        session.undecoded.append(DecoderContext(kept[-1].tensor))

    def borrows(self, session: Session) -> bool:
        """See `Backend.borrows`."""
        return self.parallel.borrowed == session.name

    def leave(self, session: Session, purpose: TransferPurpose = TransferPurpose.SUSPENSION) -> Transfer:
        """See `Backend.leave`."""
        state, offloads = whole(session.state), purpose is TransferPurpose.RESIDENCY
        extent = self.host.take_cell() if offloads else self._take_host()
        snapshot = Snapshot(header_of(state, self.fingerprint), tensors_of(state, self._profile))
        fails, way = offloads and self._faults.offload_fails(), TransferDirection.LEAVING
        name, copy_s = session.name, self._copy_s
        return VirtualTransfer(name, way, snapshot, extent, copy_s, self._clock, purpose, fails=fails)

    def store(self, snapshot: Snapshot) -> Transfer:
        """See `Backend.store`."""
        way, purpose = TransferDirection.LEAVING, TransferPurpose.STORAGE
        name, extent, copy_s = snapshot.session, self._take_host(), self._copy_s
        return VirtualTransfer(name, way, snapshot, extent, copy_s, self._clock, purpose)

    def _take_host(self) -> Extent:
        size = self.state_host_bytes
        if self._faults.host_full():
            raise HostPoolFullError(size, 0, self.host.limit_bytes, 0)
        return self.host.take(size)

    def arrive(self, snapshot: Snapshot, slab: Slab, extent: Extent | None) -> tuple[SessionState, Transfer]:
        """See `Backend.arrive`."""
        state = restore(snapshot.header, snapshot.tensors["numbers"], slab, self.config)
        arrival, way = arrives(state, self._profile.state_layers, self._clock), TransferDirection.ARRIVING
        name, copy_s = snapshot.session, self._copy_s
        return state, VirtualTransfer(name, way, snapshot, extent, copy_s, self._clock, arrival=arrival)

    # A session's forwards

    def chunk(self, state: SessionState) -> ChunkWork:
        """See `Backend.chunk`."""
        return VirtualChunk(virtual(state), self._profile, self.config.frames_per_chunk)

    def recache(self, state: SessionState) -> Work:
        """See `Backend.recache`."""
        frames = min(len(whole(state).recent) * self.config.frames_per_chunk, self.config.window_frames)
        return VirtualPass(state.session, frames, 1)

    def replay(self, state: SessionState, parts: Sequence[ReplayPart]) -> Work:
        """See `Backend.replay`."""
        return VirtualPass(state.session, self.config.frames_per_chunk, len(parts))

    def set_prompt(self, state: SessionState, prompt: str, text: Tensor) -> None:
        """See `Backend.set_prompt`."""
        whole(state)
        state.prompt, state.text = prompt, text

    def finish(self, state: SessionState, chunk: ChunkWork) -> None:
        """See `Backend.finish`."""
        latents = cast(Latents, chunk.clean)
        virtual(state).number = latents.number
        state.remember(latents.tensor, self.config)

    # Computing

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """See `Backend.forward`."""
        passes = [cast("VirtualChunk | VirtualPass", work) for work in works]
        self._harm(each.session for each in passes)
        for each in passes:
            self._faults.on_forward(each.session)
        # The row of the borrowed session comes first, as on a real device.
        alone = [each for each in passes if not self._with_donor(each)]
        if alone:
            if self._profile.state_layers > 1:
                chunks = (each.state for each in alone if isinstance(each, VirtualChunk))
                self._clock.advance(layers_wait_s(chunks, self._forward(len(alone))))
            self.compute(self._time(alone))
        self.parallel.split = len(alone) < len(passes)
        return [_COMPUTED] * len(passes)

    def _with_donor(self, each: VirtualChunk | VirtualPass) -> bool:
        """Compute a row together with a donor, if its session has one. Returns whether that was done."""
        loans = self.parallel
        return loans.borrowed == each.session and loans.forward(each.frames, self._time([each]))

    def _time(self, passes: Sequence[VirtualChunk | VirtualPass]) -> float:
        """Return the time of one forward of so many rows on this device."""
        if passes[0].frames > self.config.frames_per_chunk:
            return self._recache(len(passes))
        return self._seconds(passes)

    def _seconds(self, passes: Sequence[VirtualChunk | VirtualPass]) -> float:
        """Return L(rows, configuration): a row leaves the batch after its own number of forwards."""
        seconds = 0.0
        for number in range(max(each.forwards for each in passes)):
            rows = [each for each in passes if each.forwards > number]
            seconds += self._forward(len(rows)) * sum(each.share for each in rows) / len(rows)
        return seconds

    def decode(self, batch: Sequence[Decoding]) -> list[Decoded]:
        """See `Backend.decode`."""
        self._harm(each.session.name for each in batch)
        for each in batch:
            whole(each.session.state)
        self.compute(self._decode(len(batch)))
        return [Decoded(each.item.latents, each.item.latents, {}) for each in batch]

    def _harm(self, sessions: Any) -> None:
        if self._faults.failing:
            for session in sessions:
                if session in self._faults.failing:
                    raise RuntimeError(f"the virtual device fails for {session}")

    # Migrations

    def pages_in_use(self, session: Session) -> list[Page]:
        """See `Backend.pages_in_use`."""
        state = whole(session.state)
        return pages_of_tensors(tensors_of(state, self._profile), (state.number, state.next_chunk))

    def pages_quiesced(self, session: Session) -> tuple[dict[str, Any], list[Page]]:
        """See `Backend.pages_quiesced`."""
        return header_of(virtual(session.state), self.fingerprint), self.pages_in_use(session)

    def pages_of(self, snapshot: Snapshot) -> tuple[dict[str, Any], list[Page]]:
        """See `Backend.pages_of`."""
        return dict(snapshot.header), pages_of_tensors(snapshot.tensors, snapshot.next_chunk)

    def receive_buffer(self, *, on_host: bool, cell: bool = False) -> VirtualBuffer:
        """See `Backend.receive_buffer`."""
        if not (on_host or cell):
            return VirtualBuffer(self.pool.acquire(), None, self.fingerprint, self._profile)
        extent = self.host.take_cell() if cell else self._take_host()
        return VirtualBuffer(None, extent, self.fingerprint, self._profile)
