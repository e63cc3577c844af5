"""The engine's session table: active sessions, sessions suspended on the host, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from turboserve.worker.engine.backend import Backend, JobExecutor, ReceiveBuffer
from turboserve.worker.engine.errors import DuplicateSessionError, UnknownSessionError
from turboserve.worker.engine.interface import EngineOptions, SessionSpec
from turboserve.worker.engine.memory import Extent, Slab
from turboserve.worker.engine.session import (
    QUIESCED,
    RUNNING,
    STARTING,
    FirstChunk,
    Playhead,
    Session,
    Transferring,
)
from turboserve.worker.engine.snapshot import Snapshot, Transfer, TransferDirection
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.streams import Wakeup

T = TypeVar("T", bound=Transfer | None)


@dataclass(frozen=True, eq=False)
class _Suspended:
    """A suspended session: its state is on the host, the rest of the session is kept here."""

    session: Session | None
    """None: the session arrived suspended."""
    snapshot: Snapshot
    extent: Extent


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

    def active(self, session: str) -> Session:
        """The active session of this name. Raises `UnknownSessionError`."""
        if session not in self.sessions:
            raise UnknownSessionError(session, "active")
        return self.sessions[session]

    def suspended(self, session: str) -> Snapshot:
        """Snapshot of the suspended session of this name, in the host pool. Raises `UnknownSessionError`."""
        if session not in self._suspended:
            raise UnknownSessionError(session, "suspended")
        return self._suspended[session].snapshot

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
            extent = self.host.shorten(buffer.extent, buffer.used_bytes)
            self._suspended[name] = _Suspended(None, snapshot, extent)
            return
        state = buffer.state(header, names)
        session = Session(state, self._options.max_lead_s, Playhead(reported_at_s=now), QUIESCED)
        session.delivered = state.next_chunk
        if not state.next_chunk:
            session.first = FirstChunk(0, now)
        self.sessions[name] = session

    def release(self, buffer: ReceiveBuffer) -> None:
        """See `Engine.release`."""
        if buffer.extent is None:
            self.pool.release(buffer.slab)
        else:
            self.host.give_back(buffer.extent)

    def admit(self, spec: SessionSpec, snapshot: Snapshot | None) -> Session:
        """See `Engine.admit`."""
        if self.knows(spec.session):
            raise DuplicateSessionError(spec.session)
        if spec.rebuild is not None:
            self._backend.check(spec.rebuild)
        state, transfer = self._seated(
            lambda slab: (
                (self._backend.fresh(spec, slab), None)
                if snapshot is None
                else self._backend.arrive(snapshot, slab, None)
            )
        )
        session = Session(state, self._options.max_lead_s, Playhead(position_s=spec.playhead_s))
        if spec.rebuild is not None and snapshot is None:
            self._backend.rebuild(session, spec.rebuild)
        session.delivered = state.next_chunk
        self.sessions[spec.session] = session
        if transfer is not None:
            self._transfer(session, transfer)
        return session

    def suspend(self, session: Session) -> None:
        """Begin to move a session at a chunk boundary to the host. Raises `HostPoolFullError` or
        `HostMemoryUnavailableError`; then the session is as before."""
        self._transfer(session, self._backend.leave(session))

    def resume(self, name: str) -> Session:
        """Begin to bring a suspended session back. Raises `UnknownSessionError` or `SlabsExhaustedError`."""
        snapshot = self.suspended(name)
        suspended = self._suspended[name]
        state, transfer = self._seated(lambda slab: self._backend.arrive(snapshot, slab, suspended.extent))
        session = suspended.session or Session(state, self._options.max_lead_s, Playhead())
        session.state, session.delivered = state, state.next_chunk
        session.suspending = False
        del self._suspended[name]
        self.sessions[name] = session
        self._transfer(session, transfer)
        return session

    def transferred(self, transfer: Transfer) -> Session | None:
        """Record a finished transfer. Returns its session, or None if the session was evicted meanwhile."""
        session = self.sessions.get(transfer.session)
        if session is None or _transfer_of(session) is not transfer:
            return None
        arrived, failed = transfer.way is TransferDirection.ARRIVING, transfer.error is not None
        session.activity = STARTING if arrived else RUNNING
        if transfer.extent is not None and (failed or arrived):
            self.host.give_back(transfer.extent)
        elif transfer.extent is not None:
            self._drop(session)
            self._suspended[session.name] = _Suspended(session, transfer.snapshot, transfer.extent)
        return session

    def evict(self, name: str) -> None:
        """See `Engine.evict`."""
        if name in self._suspended:
            self.host.give_back(self._suspended.pop(name).extent)
            return
        session = self.active(name)
        transfer = _transfer_of(session)
        if transfer is not None:
            transfer.give_up()
            if transfer.extent is not None:
                self.host.give_back(transfer.extent)
        self._drop(session)

    def _drop(self, session: Session) -> None:
        del self.sessions[session.name]
        self.pool.release(session.state.slab)
        session.state.forget()
        session.task = None
        session.undecoded.clear()

    def _transfer(self, session: Session, transfer: Transfer) -> None:
        session.activity = Transferring(transfer)
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
    return session.activity.transfer if isinstance(session.activity, Transferring) else None
