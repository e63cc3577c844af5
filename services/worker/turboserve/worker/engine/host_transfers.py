"""Transfers of session states between slabs and host memory: how they begin, complete and are given up."""

from __future__ import annotations

from turboserve.worker.engine.activity import (
    RUNNING,
    STARTING,
    HostState,
    Offloaded,
    Transferring,
)
from turboserve.worker.engine.backend import Backend, JobExecutor
from turboserve.worker.engine.session import Session
from turboserve.worker.engine.state_transfer import Transfer, TransferDirection, TransferPurpose
from turboserve.worker.engine.streams import Wakeup


class HostTransfers:
    """Gives each transfer to the transfer executor, and its result to the session and the memory pools."""

    def __init__(self, backend: Backend, executor: JobExecutor[Transfer], wakeup: Wakeup) -> None:
        self._backend, self._executor, self._wakeup = backend, executor, wakeup
        self._stored: dict[str, HostState] = {}
        """States in cells whose copies to the memory of suspended sessions are in progress."""

    def suspend(self, session: Session) -> None:
        """Begin to move a session at a chunk boundary to the host. Raises `HostPoolFullError` or
        `HostMemoryUnavailableError`; then the session is as before."""
        if isinstance(session.activity, Offloaded):
            assert session.activity.state is not None
            host = session.activity.state
            if self._backend.host.is_cell(host.extent):
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
            self.begin(session, transfer)
        else:
            self.begin(session, self._backend.leave(session))

    def offload(self, session: Session, now: float) -> None:
        """Begin to move a session at a chunk boundary to a cell of the host; it stays active. Raises
        `HostPoolFullError`; then the session is as before."""
        transfer = self._backend.leave(session, TransferPurpose.RESIDENCY)
        transfer.began_s = now
        self.begin(session, transfer)

    def bring(self, session: Session, host: HostState) -> None:
        """Begin to give a state on the host a free slab. Raises `SlabsExhaustedError` or
        `SnapshotRejectedError`."""
        session.state, transfer = self._backend.pool.acquire_for(
            lambda slab: self._backend.arrive(host.snapshot, slab, host.extent)
        )
        self.begin(session, transfer)

    def begin(self, session: Session, transfer: Transfer) -> None:
        """Submit the transfer. The session waits until it completes or has brought a first layer."""
        session.activity = Transferring(transfer)
        transfer.on_begun = self._wakeup.notify_done
        self._executor.submit(transfer)

    def complete(self, session: Session, transfer: Transfer) -> HostState | None:
        """Record the result of a session's transfer. Returns its state if the session is now suspended."""
        if transfer.way is TransferDirection.ARRIVING:
            self._arrived(session, transfer)
            return None
        pool, host = self._backend.pool, self._backend.host
        assert transfer.extent is not None
        state = HostState(transfer.snapshot, transfer.extent)
        stored = self._stored.pop(session.name, None)
        if transfer.error is not None:
            host.give_back(transfer.extent)
            session.activity = RUNNING if stored is None else Offloaded(stored)
            return None
        if transfer.purpose is TransferPurpose.RESIDENCY:
            pool.release(session.state.slab)
            session.state.forget()
            session.activity = Offloaded(state)
            return None
        if stored is not None:
            host.give_back(stored.extent)
        return state

    def _arrived(self, session: Session, transfer: Transfer) -> None:
        session.arriving = None
        if isinstance(session.activity, Transferring):
            session.activity = STARTING
        if transfer.extent is not None:
            self._backend.host.give_back(transfer.extent)
        if transfer.error is None and transfer.arrival is not None:
            session.state.ring.has_arrived()

    def give_up(self, session: Session) -> None:
        """End the transfer of an evicted session, and free what it has on the host."""
        host, transfer = self._backend.host, transfer_of(session)
        if transfer is not None:
            transfer.give_up()
            if transfer.extent is not None:
                host.give_back(transfer.extent)
        if (stored := self._stored.pop(session.name, None)) is not None:
            host.give_back(stored.extent)
        if isinstance(session.activity, Offloaded) and session.activity.state is not None:
            host.give_back(session.activity.state.extent)


def transfer_of(session: Session) -> Transfer | None:
    """The session's transfer in progress, if there is one."""
    if isinstance(session.activity, Transferring):
        return session.activity.transfer
    return session.arriving
