"""Locks of the rows that a placement or a migration depends on."""

from __future__ import annotations

from turboserve.contracts.leading import LeaderRecord
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.state_store.ports.records import LockedPlacement, SessionRow


class MemoryPlacements:
    """`PlacementRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db = session

    async def lock(self, leader: str, worker: str, session: str) -> LockedPlacement:
        db, tables = self._db, self._db.tables

        def run() -> LockedPlacement:
            term = db.lock(tables.leaders, leader, LockMode.KEY_SHARE)
            owner = db.lock(tables.workers, worker)
            row = db.lock(tables.sessions, session)
            return LockedPlacement(
                leader=term or LeaderRecord(name=leader),
                worker=None if owner is None else owner.record,
                session=None if row is None else SessionRow(row.record, row.fence_revision),
            )

        return await db.execute(run)
