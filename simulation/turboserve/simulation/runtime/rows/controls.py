"""Prompts and controls of a session, and decisions about it."""

from __future__ import annotations

from dataclasses import replace

from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.simulation.runtime.rows.changes import insert_decision
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.tables import ControlEntry, DecisionEntry
from turboserve.state_store.core.receipts import Receipt, SettledControl, receipt_id

_SAME = ("epoch", "worker", "kind", "reason")


class MemoryControls:
    """`ControlRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db = session
        self._controls, self._decisions = session.tables.controls, session.tables.decisions

    async def insert(self, receipt: Receipt) -> None:
        def run() -> None:
            self._db.refer(self._db.tables.sessions, receipt.session)
            self._db.insert(self._controls, (receipt.session, receipt.control_seq), ControlEntry(receipt))

        await self._db.execute(run)

    async def receipt(self, receipt_id: str) -> Receipt | None:
        def run() -> Receipt | None:
            found = self._db.find(self._controls, "receipt_id", receipt_id)
            return found[0][1].receipt if found else None

        return await self._db.execute(run)

    async def settle(
        self, session: str, control_seq: int, chunk_index: int, now: float
    ) -> list[SettledControl]:
        def run() -> list[SettledControl]:
            due = {}
            for key, _ in self._db.find(self._controls, "unsettled", session):
                if key[1] > control_seq:
                    continue
                entry = self._db.lock(self._controls, key, LockMode.NO_KEY_UPDATE)
                if entry is not None and not entry.settled:
                    due[key] = entry
            newest = {entry.name: entry.receipt for _, entry in sorted(due.items())}
            settled = []
            for key, entry in sorted(due.items()):
                winner = newest[entry.name]
                if winner.control_seq == key[1]:
                    after = replace(entry, applied_at=now, chunk_index=chunk_index)
                    settled.append(SettledControl(entry.receipt))
                else:
                    after = replace(entry, superseded_by=winner.control_seq)
                    settled.append(SettledControl(entry.receipt, receipt_id(winner)))
                self._db.update(self._controls, key, after)
            return settled

        return await self._db.execute(run)

    async def decided(self, record: SessionRecord, version: int, worker: str) -> bool:
        def run() -> bool:
            found = self._db.find(self._decisions, "version", (record.id, version))
            return any(
                entry.decision.epoch == record.epoch and entry.decision.worker == worker for _, entry in found
            )

        return await self._db.execute(run)

    async def migrated(self, record: SessionRecord, migration: int) -> bool:
        def run() -> bool:
            return any(
                entry.decision.epoch == record.epoch
                and entry.decision.kind == "migrated"
                and entry.decision.numbers.get("migration") == float(migration)
                for _, entry in self._db.find(self._decisions, "session", record.id)
            )

        return await self._db.execute(run)

    async def note(self, decision: Decision) -> None:
        def read() -> tuple[int, DecisionEntry] | None:
            found = self._db.find(self._decisions, "session", decision.session)
            return max(found, key=lambda row: row[0], default=None)

        last = await self._db.execute(read)
        if last is not None:
            number, entry = last
            before = entry.decision
            if entry.version is None and all(getattr(before, n) == getattr(decision, n) for n in _SAME):
                after = before.model_copy(update={"numbers": decision.numbers, "at": decision.at})

                def update() -> None:
                    if self._db.lock(self._decisions, number, LockMode.NO_KEY_UPDATE) is not None:
                        self._db.update(self._decisions, number, DecisionEntry(after, None))

                await self._db.execute(update)
                return
        await self._db.execute(lambda: insert_decision(self._db, decision, None))

    async def decisions_of(self, session: str, limit: int) -> list[Decision]:
        def run() -> list[Decision]:
            found = sorted(self._db.find(self._decisions, "session", session), key=lambda row: row[0])
            return [entry.decision for _, entry in found[-limit:]]

        return await self._db.execute(run)
