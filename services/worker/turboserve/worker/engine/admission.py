"""The engine's session table: active sessions, in slabs and outside, suspended sessions, and their memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from turboserve.worker.engine.activity import QUIESCED, STARTING, HostState, Offloaded, Transferring
from turboserve.worker.engine.backend import Backend, JobExecutor, ReceiveBuffer
from turboserve.worker.engine.errors import (
    DuplicateSessionError,
    SessionsExhaustedError,
    UnknownSessionError,
)
from turboserve.worker.engine.host_transfers import HostTransfers, transfer_of
from turboserve.worker.engine.interface import EngineOptions, SessionSpec
from turboserve.worker.engine.session import FirstChunk, Playhead, Session
from turboserve.worker.engine.snapshot import Snapshot, outline
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.state_transfer import Transfer
from turboserve.worker.engine.streams import Wakeup


@dataclass(frozen=True, eq=False)
class _Suspended:
    """A suspended session: its state is on the host, the rest of the session is kept here."""

    session: Session | None
    """None: the session arrived suspended."""
    state: HostState


class SessionTable:
    """Active and suspended sessions. Every slab and every host byte in use belongs to exactly one of them, or
    is reserved for an arriving session (`Engine.reserve`)."""

    def __init__(self, backend: Backend, options: EngineOptions, wakeup: Wakeup) -> None:
        """`wakeup` is signaled when a transfer is done."""
        self.device = backend.device
        self.pool, self.host = backend.pool, backend.host
        self.transfers: JobExecutor[Transfer] = backend.executor("transfer", wakeup)
        self.host_transfers = HostTransfers(backend, self.transfers, wakeup)
        self.sessions: dict[str, Session] = {}
        """Active sessions by name, and sessions whose state is being transferred."""
        self._suspended: dict[str, _Suspended] = {}
        self._backend = backend
        self._options = options
        self._reserved = 0
        """Places of active sessions that are reserved for arriving ones."""

    @property
    def outside(self) -> int:
        """Number of active sessions without a slab."""
        # A copy: the service reads the number on another thread.
        return sum(not session.has_slab for session in list(self.sessions.values()))

    @property
    def places(self) -> int:
        """Number of active sessions that slabs and host memory hold together."""
        return self.pool.slabs + self._options.host_sessions

    def active(self, session: str) -> Session:
        """The active session of this name. Raises `UnknownSessionError`."""
        if session not in self.sessions:
            raise UnknownSessionError(session, "active")
        return self.sessions[session]

    def suspended(self, session: str) -> Snapshot:
        """Snapshot of the suspended session of this name, in the host pool. Raises `UnknownSessionError`."""
        if session not in self._suspended:
            raise UnknownSessionError(session, "suspended")
        return self._suspended[session].state.snapshot

    def knows(self, session: str) -> bool:
        """Whether a session of this name is here, active or suspended."""
        return session in self.sessions or session in self._suspended

    def arrived(
        self, buffer: ReceiveBuffer, header: Mapping[str, Any], names: Iterable[str], now: float
    ) -> None:
        """See `Engine.import_session`."""
        name = str(header["session"])
        if self.knows(name):
            raise DuplicateSessionError(name)
        if buffer.extent is not None:
            snapshot = buffer.snapshot(header, names)
            host = HostState(snapshot, self.host.shorten(buffer.extent, buffer.used_bytes))
            if not self.host.is_cell(host.extent):
                self._suspended[name] = _Suspended(None, host)
                return
            session = self._outside(self._outlined(snapshot), Offloaded(host, quiesced=True))
            session.playhead.reported_at_s = now
        else:
            state = buffer.state(header, names)
            session = Session(state, self._options.max_lead_s, Playhead(reported_at_s=now), QUIESCED)
            session.delivered = state.next_chunk
        if not session.state.next_chunk:
            session.first = FirstChunk(0, now)
        self.sessions[name] = session
        # Last: the buffer of a rejected session is released, which ends the reservation.
        self._reserved -= 1

    def reserve(self, *, on_host: bool) -> ReceiveBuffer:
        """See `Engine.reserve`."""
        if on_host:
            return self._backend.receive_buffer(on_host=True)
        self._check_places()
        cell = self._waits_for_slab and bool(self.host.free_cells or not self.pool.free)
        buffer = self._backend.receive_buffer(on_host=False, cell=cell)
        self._reserved += 1
        return buffer

    def release(self, buffer: ReceiveBuffer) -> None:
        """See `Engine.release`."""
        if buffer.extent is None:
            self._reserved -= 1
            self.pool.release(buffer.slab)
        else:
            self._reserved -= self.host.is_cell(buffer.extent)
            self.host.give_back(buffer.extent)

    def admit(self, spec: SessionSpec, snapshot: Snapshot | None) -> Session:
        """See `Engine.admit`. Without a free slab, the session begins outside."""
        if self.knows(spec.session):
            raise DuplicateSessionError(spec.session)
        if spec.rebuild is not None:
            self._backend.check(spec.rebuild)
        self._check_places()
        if self._waits_for_slab:
            state = self._backend.fresh(spec, self.pool.placeholder())
            if snapshot is not None:
                state = self._outlined(snapshot)
            elif spec.rebuild is not None:
                state.next_chunk = spec.rebuild.next_chunk
            session = self._outside(state, Offloaded(None, spec, snapshot))
            session.playhead.position_s = spec.playhead_s
            self.sessions[spec.session] = session
            return session
        state, transfer = self._first_slab(spec, snapshot)
        session = Session(state, self._options.max_lead_s, Playhead(position_s=spec.playhead_s))
        self._begin(session, spec, snapshot, transfer)
        return session

    def _first_slab(
        self, spec: SessionSpec, snapshot: Snapshot | None
    ) -> tuple[SessionState, Transfer | None]:
        return self.pool.acquire_for(
            lambda slab: (
                (self._backend.fresh(spec, slab), None)
                if snapshot is None
                else self._backend.arrive(snapshot, slab, None)
            )
        )

    def _begin(
        self, session: Session, spec: SessionSpec, snapshot: Snapshot | None, transfer: Transfer | None
    ) -> None:
        """Begin a session that has got its first slab."""
        if spec.rebuild is not None and snapshot is None:
            self._backend.rebuild(session, spec.rebuild)
        session.delivered = session.state.next_chunk
        self.sessions[spec.session] = session
        if transfer is not None:
            self.host_transfers.begin(session, transfer)

    def bring_back(self, session: Session) -> None:
        """Begin to give an offloaded session a free slab. Raises `SlabsExhaustedError` or
        `SnapshotRejectedError`."""
        assert isinstance(session.activity, Offloaded)
        outside = session.activity
        if outside.state is not None:
            self.host_transfers.bring(session, outside.state)
        else:
            assert outside.spec is not None
            session.state, transfer = self._first_slab(outside.spec, outside.arrived)
            session.activity = STARTING
            self._begin(session, outside.spec, outside.arrived, transfer)

    def resume(self, name: str) -> Session:
        """Begin to bring a suspended session back. Without a free slab, it is active outside.

        Raises `UnknownSessionError` or `SlabsExhaustedError`.
        """
        snapshot = self.suspended(name)
        suspended = self._suspended[name]
        self._check_places()
        if self._waits_for_slab:
            outlined = self._outlined(snapshot)
            session = suspended.session or self._outside(outlined, Offloaded(suspended.state))
            session.state, session.activity = outlined, Offloaded(suspended.state)
        else:
            session = suspended.session or self._outside(self._outlined(snapshot), Offloaded(suspended.state))
            self.host_transfers.bring(session, suspended.state)
        session.delivered = session.state.next_chunk
        session.suspending = False
        del self._suspended[name]
        self.sessions[name] = session
        return session

    @property
    def first_layers(self) -> list[Transfer]:
        """Transfers whose first layer has arrived, and whose sessions do not compute yet."""
        if not self.transfers.load:
            return []
        return [
            session.activity.transfer
            for session in self.sessions.values()
            if isinstance(session.activity, Transferring)
            and session.activity.transfer.arrival is not None
            and session.activity.transfer.arrival.begun
        ]

    def begin(self, transfer: Transfer) -> None:
        """Let a session compute while later layers of its state arrive."""
        session = self.sessions[transfer.session]
        session.activity, session.arriving = STARTING, transfer

    def transferred(self, transfer: Transfer) -> Session | None:
        """Record a finished transfer. Returns its session, or None if the session was evicted meanwhile."""
        session = self.sessions.get(transfer.session)
        if session is None or transfer_of(session) is not transfer:
            return None
        state = self.host_transfers.complete(session, transfer)
        if state is not None:
            self._drop(session)
            self._suspended[session.name] = _Suspended(session, state)
        return session

    def evict(self, name: str) -> None:
        """See `Engine.evict`."""
        if name in self._suspended:
            self.host.give_back(self._suspended.pop(name).state.extent)
            return
        session = self.active(name)
        self.host_transfers.give_up(session)
        self._drop(session)

    @property
    def _waits_for_slab(self) -> bool:
        """Whether a session that becomes active waits outside: no slab is free, or others wait for one."""
        if not self._options.host_sessions:
            return False
        # A quiesced session waits for no slab: it leaves the worker, or continues later.
        others = any(
            isinstance(each.activity, Offloaded) and not each.activity.quiesced
            for each in self.sessions.values()
        )
        return others or not self.pool.free

    def _check_places(self) -> None:
        """Raise `SessionsExhaustedError` if slabs and host memory hold no further active session."""
        if self._options.host_sessions and len(self.sessions) + self._reserved >= self.places:
            layout = self.pool.layout
            raise SessionsExhaustedError(
                self.pool.slabs, layout.total_bytes, self._options.host_sessions, self.host.cell_bytes
            )

    def _outlined(self, snapshot: Snapshot) -> SessionState:
        """The state of a snapshot without its tensors."""
        spec = SessionSpec(snapshot.session, str(snapshot.header["prompt"]), int(snapshot.header["seed"]))
        state = self._backend.fresh(spec, self.pool.placeholder())
        outline(state, snapshot.header, self._backend.config)
        return state

    def _outside(self, state: SessionState, activity: Offloaded) -> Session:
        session = Session(state, self._options.max_lead_s, Playhead(), activity)
        session.delivered = state.next_chunk
        return session

    def _drop(self, session: Session) -> None:
        del self.sessions[session.name]
        if session.has_slab:
            self.pool.release(session.state.slab)
        session.state.forget()
        session.task = session.arriving = None
        session.offloading = False
        session.undecoded.clear()
