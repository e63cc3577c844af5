"""The engine's session table: active sessions, in slabs and outside, suspended sessions, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from turboserve.worker.engine.backend import Backend, JobExecutor, ReceiveBuffer
from turboserve.worker.engine.errors import (
    DuplicateSessionError,
    SessionsExhaustedError,
    UnknownSessionError,
)
from turboserve.worker.engine.interface import EngineOptions, SessionSpec
from turboserve.worker.engine.memory import Slab
from turboserve.worker.engine.session import (
    QUIESCED,
    RUNNING,
    STARTING,
    FirstChunk,
    HostState,
    Offloaded,
    Playhead,
    Session,
    Transferring,
)
from turboserve.worker.engine.snapshot import Snapshot, Transfer, TransferDirection, TransferPurpose, outline
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.streams import Wakeup

T = TypeVar("T", bound=Transfer | None)


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
        self.sessions: dict[str, Session] = {}
        """Active sessions by name, and sessions whose state is being transferred."""
        self._suspended: dict[str, _Suspended] = {}
        self._backend = backend
        self._options = options
        self._wakeup = wakeup
        self._reserved = 0
        """Places of active sessions that are reserved for arriving ones."""
        self._stored: dict[str, HostState] = {}
        """States in cells whose copies to the memory of suspended sessions are in progress."""

    @property
    def outside(self) -> int:
        """Number of active sessions without a slab."""
        # A copy: the service reads the number on another thread.
        return sum(not session.has_slab for session in list(self.sessions.values()))

    @property
    def places(self) -> int:
        """Number of active sessions that slabs and host memory hold together."""
        return self.pool.slots + self._options.host_sessions

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
        return self._seated(
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
            self._transfer(session, transfer)

    def suspend(self, session: Session) -> None:
        """Begin to move a session at a chunk boundary to the host. Raises `HostPoolFullError` or
        `HostMemoryUnavailableError`; then the session is as before."""
        if isinstance(session.activity, Offloaded):
            assert session.activity.state is not None
            host = session.activity.state
            if self.host.is_cell(host.extent):
                transfer = self._backend.store(host.snapshot)
                self._stored[session.name] = host
            else:
                # It has resumed outside, and its state is still where suspended sessions have theirs.
                transfer = Transfer(
                    session.name,
                    TransferDirection.LEAVING,
                    host.snapshot,
                    host.extent,
                    targets={},
                    sources={},
                    purpose=TransferPurpose.STORAGE,
                )
            self._transfer(session, transfer)
        else:
            self._transfer(session, self._backend.leave(session))

    def offload(self, session: Session, now: float) -> None:
        """Begin to move a session at a chunk boundary to a cell of the host; it stays active. Raises
        `HostPoolFullError`; then the session is as before."""
        transfer = self._backend.leave(session, TransferPurpose.RESIDENCY)
        transfer.began_s = now
        self._transfer(session, transfer)

    def bring_back(self, session: Session) -> None:
        """Begin to give an offloaded session a free slab. Raises `SlabsExhaustedError` or
        `SnapshotRejectedError`."""
        assert isinstance(session.activity, Offloaded)
        outside = session.activity
        if outside.state is not None:
            self._arrive(session, outside.state)
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
            self._arrive(session, suspended.state)
        session.delivered = session.state.next_chunk
        session.suspending = False
        del self._suspended[name]
        self.sessions[name] = session
        return session

    @property
    def first_layers(self) -> list[Transfer]:
        """Transfers whose first layer has arrived, and whose sessions do not compute yet."""
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
        if session is None or _transfer_of(session) is not transfer:
            return None
        failed = transfer.error is not None
        if transfer.way is TransferDirection.ARRIVING:
            session.arriving = None
            if isinstance(session.activity, Transferring):
                session.activity = STARTING
            if transfer.extent is not None:
                self.host.give_back(transfer.extent)
            if not failed and transfer.arrival is not None:
                session.state.ring.has_arrived()
            return session
        assert transfer.extent is not None
        host = HostState(transfer.snapshot, transfer.extent)
        stored = self._stored.pop(session.name, None)
        if failed:
            self.host.give_back(transfer.extent)
            session.activity = RUNNING if stored is None else Offloaded(stored)
        elif transfer.purpose is TransferPurpose.RESIDENCY:
            self.pool.release(session.state.slab)
            session.state.forget()
            session.activity = Offloaded(host)
        else:
            if stored is not None:
                self.host.give_back(stored.extent)
            self._drop(session)
            self._suspended[session.name] = _Suspended(session, host)
        return session

    def evict(self, name: str) -> None:
        """See `Engine.evict`."""
        if name in self._suspended:
            self.host.give_back(self._suspended.pop(name).state.extent)
            return
        session = self.active(name)
        transfer = _transfer_of(session)
        if transfer is not None:
            transfer.give_up()
            if transfer.extent is not None:
                self.host.give_back(transfer.extent)
        if (stored := self._stored.pop(name, None)) is not None:
            self.host.give_back(stored.extent)
        if isinstance(session.activity, Offloaded) and session.activity.state is not None:
            self.host.give_back(session.activity.state.extent)
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
                self.pool.slots, layout.total_bytes, self._options.host_sessions, self.host.cell_bytes
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

    def _arrive(self, session: Session, host: HostState) -> None:
        state, transfer = self._seated(lambda slab: self._backend.arrive(host.snapshot, slab, host.extent))
        session.state = state
        self._transfer(session, transfer)

    def _drop(self, session: Session) -> None:
        del self.sessions[session.name]
        if session.has_slab:
            self.pool.release(session.state.slab)
        session.state.forget()
        session.task = session.arriving = None
        session.offloading = False
        session.undecoded.clear()

    def _transfer(self, session: Session, transfer: Transfer) -> None:
        session.activity = Transferring(transfer)
        transfer.on_begun = self._wakeup.notify_done
        self.transfers.submit(transfer)

    def _seated(self, build: Callable[[Slab], tuple[SessionState, T]]) -> tuple[SessionState, T]:
        """Return the result of `build` for a free slab: a state on it, and the transfer that still has to
        fill the slab. The slab is released if `build` fails."""
        slab = self.pool.acquire()
        try:
            return build(slab)
        except BaseException:
            self.pool.release(slab)
            raise


def _transfer_of(session: Session) -> Transfer | None:
    if isinstance(session.activity, Transferring):
        return session.activity.transfer
    return session.arriving
