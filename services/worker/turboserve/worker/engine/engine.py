"""The engine: sessions in, chunks out. One thread owns it and calls `step`; it does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from turboserve.worker.engine.activity import (
    RUNNING,
    Offloaded,
    QuiescedAtBoundary,
    QuiesceRequest,
    Transferring,
)
from turboserve.worker.engine.backend import ReceiveBuffer
from turboserve.worker.engine.control_encoder import given_chunk
from turboserve.worker.engine.errors import UnknownSessionError
from turboserve.worker.engine.fidelity import check_floor
from turboserve.worker.engine.interface import Control, SessionSpec
from turboserve.worker.engine.pending_control import PendingControl
from turboserve.worker.engine.pipeline import Pipeline
from turboserve.worker.engine.playout import Playout, Tier
from turboserve.worker.engine.session import FirstChunk, Session
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.state_pages import Page

if TYPE_CHECKING:
    from pydantic import JsonValue

    from turboserve.contracts.control_declarations import ControlDeclaration


class Engine(Pipeline):
    """Runs many sessions on one device. Not thread-safe.

    Every `now` is monotonic seconds on the caller's clock, which `clock` must read too.
    """

    @property
    def host_states(self) -> int:
        """Number of suspended sessions that the host memory holds at once, at their largest size."""
        return self.options.host_bytes // self.backend.state_host_bytes

    @property
    def free_slabs(self) -> int:
        """Number of slabs that are free."""
        return self._table.pool.free

    @property
    def slabs(self) -> int:
        """Number of sessions that the device holds at once."""
        return self._table.pool.slabs

    @property
    def places(self) -> int:
        """Number of active sessions that device and host memory hold together."""
        return self._table.places

    @property
    def offloaded(self) -> int:
        """Number of active sessions without a slab."""
        return self._table.outside

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the host memory for offloaded sessions that are in use."""
        return self._table.host.cell_bytes_used

    @property
    def device(self) -> torch.device:
        """The device of the sessions' states."""
        return self._table.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the sessions' latents."""
        return self._table.pool.layout.dtype

    @property
    def slab_bytes_used(self) -> int:
        """Bytes of the slabs in use."""
        return (self.slabs - self.free_slabs) * self._table.pool.layout.total_bytes

    @property
    def host_bytes_used(self) -> int:
        """Bytes of the host pool in use."""
        return self._table.host.used_bytes

    @property
    def sessions(self) -> Mapping[str, Session]:
        """Active sessions by name, and sessions whose state is being transferred. For reading."""
        return self._table.sessions

    def playouts(self, now: float) -> Mapping[str, Playout]:
        """Playout slack of every active session that has not ended, by name."""
        return self._forecaster.playouts(self._table.sessions.values(), now)

    def in_time_after(self, now: float, busy_s: float) -> bool:
        """Whether no viewer's next chunk is late if the device computes something else for `busy_s` first."""
        return self._forecaster.in_time_after(self._table.sessions.values(), now, busy_s)

    def tiers(self, now: float) -> Mapping[str, Tier]:
        """Tiers of the same sessions, with the times that `playouts` has found last."""
        return self._forecaster.tiers(self._table.sessions.values(), now)

    def playout_before(self, session: str, chunk: int, now: float) -> Playout | None:
        """What the viewer had left when `chunk` was delivered just now. None: the session is gone."""
        held = self._table.sessions.get(session)
        return None if held is None else self._forecaster.before(held, chunk, now)

    def expected_late(self, now: float) -> int:
        """Number of chunks within the horizon that will be late even at their lowest configurations."""
        return self.fidelity.late(self._table.sessions.values(), now)

    def knows(self, session: str) -> bool:
        """Whether a session of this name is here, active or suspended."""
        return self._table.knows(session)

    def admit(self, spec: SessionSpec, now: float, snapshot: Snapshot | None = None) -> None:
        """Admit a session: new, from the latents of a lost one (`spec.rebuild`), or from a snapshot.

        A snapshot's own prompt and counters override the spec's. Its tensors must not change until
        `SessionReady`. Raises `SlabsExhaustedError`, `DuplicateSessionError`, `InvalidRebuildError`,
        `InvalidFidelityError`, `InvalidFirstChunkError` or `SnapshotRejectedError`; then nothing has changed.
        """
        if spec.fidelity is not None:
            spec.fidelity.check(self.config)
        if spec.floor is not None:
            check_floor(spec.floor)
        first = None
        if snapshot is None:
            values = self._allowed(spec.values)
            given_chunk(self.backend.controls, values, self.config)
            first = Control(spec.control_seq, prompt=spec.prompt, values=values)
        session = self._table.admit(spec, snapshot)
        session.playhead.reported_at_s = now
        session.isolated_until = session.state.next_chunk + spec.isolated_chunks
        if spec.max_lead_s is not None:
            session.max_lead_s = self.pacing.lead(spec.max_lead_s)
        if spec.drops_buffer:
            self.pacing.skip(session, now - (spec.waiting_s or 0.0))
        elif spec.waiting_s is not None or not session.state.next_chunk:
            session.first = FirstChunk(session.state.next_chunk, now - (spec.waiting_s or 0.0))
        if first is not None:
            session.controls.append(PendingControl(first))

    def control(self, session: str, control: Control) -> None:
        """Queue a control for the session's next chunk boundary.

        Raises `UnknownSessionError` and `InvalidFidelityError`.
        """
        if control.fidelity is not None:
            control.fidelity.check(self.config)
        if control.floor is not None:
            check_floor(control.floor)
        active = self._table.active(session)
        if control.values is not None:
            control = replace(control, values=self._allowed(control.values))
        active.controls.append(PendingControl(control))

    def _allowed(self, values: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        """The values that the model's declarations allow: a session may come from a worker with others."""
        if not values:
            return values
        # Without controls, the engine needs torch, numpy and safetensors alone.
        from turboserve.control_values import allowed_values

        return allowed_values(self.declarations, values)

    @property
    def declarations(self) -> tuple[ControlDeclaration, ...]:
        """The controls that the model takes."""
        encoder = self.backend.controls
        return () if encoder is None else encoder.declarations

    def playhead(self, session: str, seconds: float, *, now: float, playing: bool = True) -> None:
        """Set the position of the session's viewer. Raises `UnknownSessionError`."""
        playhead = self._table.active(session).playhead
        playhead.position_s, playhead.reported_at_s, playhead.playing = seconds, now, playing

    def generate_next(self, session: str) -> None:
        """Make the current or next chunk due wherever its viewer is. Raises `UnknownSessionError`."""
        active = self._table.active(session)
        active.unpaced_until = active.state.next_chunk + 1

    def suspend(self, session: str) -> None:
        """Request that the session's state move to the host at the next boundary; `Suspended` reports it.

        Raises `UnknownSessionError`.
        """
        self._table.active(session).suspending = True

    def resume(self, session: str, now: float, waiting_s: float | None = None) -> None:
        """Begin to bring a suspended session back to the device; it continues when its state has arrived.

        `waiting_s`: age of the request, seconds. None: no viewer waits for it. Raises `UnknownSessionError`
        or `SlabsExhaustedError`; then the session stays suspended.
        """
        resumed = self._table.resume(session)
        resumed.playhead.reported_at_s = now
        if waiting_s is not None:
            resumed.first = FirstChunk(resumed.state.next_chunk, now - waiting_s)

    def snapshot(self, session: str) -> Snapshot:
        """State of a suspended session. The snapshot's tensors are valid until the session is resumed or
        evicted. Raises `UnknownSessionError`."""
        return self._table.suspended(session)

    def evict(self, session: str) -> None:
        """Drop a session, active or suspended, and free its memory. Raises `UnknownSessionError`."""
        self._table.evict(session)

    # Migration. At the source: `quiesce`, `pages` while the session continues, then `export_session`. At the
    # target: `reserve`, then `import_session`, or `release` without a session.

    def quiesce(self, session: str, now: float, quiet_s: float, patience_s: float, number: int = 0) -> None:
        """Request that the session be quiesced at a boundary; `SessionQuiesced` with this number reports it.

        `quiet_s`: idle window before the next chunk is due, which shrinks to zero over `patience_s`. Raises
        `UnknownSessionError`.
        """
        self._table.active(session).quiesce_request = QuiesceRequest(quiet_s, now, patience_s, number)

    def unquiesce(self, session: str) -> None:
        """Continue the session, or withdraw the request to quiesce it. Raises `UnknownSessionError`."""
        held = self._table.active(session)
        held.quiesce_request = None
        if isinstance(held.activity, QuiescedAtBoundary):
            held.activity = RUNNING
        elif isinstance(held.activity, Offloaded):
            held.activity = replace(held.activity, quiesced=False)

    def pages(self, session: str) -> Sequence[Page]:
        """Pages of an active session that no current work writes to. Raises `UnknownSessionError`.

        Empty while the session's state is being transferred: the slab may still have another session's
        contents.
        """
        held = self._table.active(session)
        held.pages_read_at_s = self._clock()
        held.offloading = False
        if isinstance(held.activity, Offloaded):
            host = held.activity.state
            return [] if host is None else self.backend.pages_of(host.snapshot)[1]
        if held.arriving is not None or isinstance(held.activity, Transferring):
            return []
        return self.backend.pages_in_use(held)

    def export_session(self, session: str) -> tuple[Mapping[str, Any], Sequence[Page]]:
        """Header and all pages of a quiesced or suspended session. Raises `UnknownSessionError`.

        The pages are views of the session's own memory. The session stays until it is evicted.
        """
        held = self._table.sessions.get(session)
        if held is None:
            return self.backend.pages_of(self.snapshot(session))
        if isinstance(held.activity, Offloaded) and held.activity.quiesced:
            assert held.activity.state is not None
            return self.backend.pages_of(held.activity.state.snapshot)
        if not isinstance(held.activity, QuiescedAtBoundary):
            raise UnknownSessionError(session, "quiesced")
        return self.backend.pages_quiesced(held)

    def reserve(self, *, on_host: bool) -> ReceiveBuffer:
        """Reserve memory for any arriving session: a slab, or a piece of the host pool.

        Where active sessions wait for slabs, it is a cell of the host instead of a slab, if one is free.
        Raises `SlabsExhaustedError`, `HostPoolFullError` or `HostMemoryUnavailableError`. `release` frees it.
        """
        return self._table.reserve(on_host=on_host)

    def release(self, buffer: ReceiveBuffer) -> None:
        """Free a buffer that received no session, and that no transfer writes to any more."""
        self._table.release(buffer)

    def import_session(
        self, buffer: ReceiveBuffer, header: Mapping[str, Any], names: Iterable[str], now: float
    ) -> None:
        """Import the session in `buffer`, in place. It stays quiesced or suspended.

        `header` and the pages' `names` come from `export_session`. Raises `DuplicateSessionError` or
        `SnapshotRejectedError`; then `buffer` is as before.
        """
        self._table.arrived(buffer, header, names, now)
