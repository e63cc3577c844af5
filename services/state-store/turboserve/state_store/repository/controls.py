"""Prompts of sessions, and decisions about sessions."""

from __future__ import annotations

from sqlalchemy import and_, case, func, insert, select, update
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import Decision, PromptReceipt, SessionRecord
from turboserve.state_store.tables import controls, decisions


def _receipt(row: RowMapping) -> PromptReceipt:
    return PromptReceipt.model_validate({**row, "control_seq": row["seq"]})


class SqlControls:
    """`ControlRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def insert_prompt(self, receipt: PromptReceipt) -> None:
        values = receipt.model_dump(exclude={"control_seq"}) | {"seq": receipt.control_seq}
        await self._db.execute(insert(controls).values(kind="prompt", **values))

    async def prompt(self, prompt_id: str) -> PromptReceipt | None:
        row = (
            (await self._db.execute(select(controls).where(controls.c.prompt_id == prompt_id)))
            .mappings()
            .first()
        )
        return None if row is None else _receipt(row)

    async def settle_prompts(
        self, session: str, control_seq: int, chunk_index: int, now: float
    ) -> list[PromptReceipt]:
        unsettled = and_(
            controls.c.session == session,
            controls.c.seq <= control_seq,
            controls.c.applied_at.is_(None),
            controls.c.superseded_by.is_(None),
        )
        newest = select(func.max(controls.c.seq)).where(unsettled).scalar_subquery()
        applied = controls.c.seq == newest
        query = (
            update(controls)
            .where(unsettled)
            .values(
                applied_at=case((applied, now)),
                chunk_index=case((applied, chunk_index)),
                superseded_by=case((~applied, newest)),
            )
            .returning(controls)
        )
        rows = (await self._db.execute(query)).mappings().all()
        return sorted((_receipt(row) for row in rows), key=lambda receipt: receipt.control_seq)

    async def decided(self, record: SessionRecord, version: int, worker: str) -> bool:
        query = select(decisions.c.version).where(
            decisions.c.session == record.id,
            decisions.c.version == version,
            decisions.c.epoch == record.epoch,
            decisions.c.worker == worker,
        )
        return (await self._db.execute(query)).first() is not None

    async def migrated(self, record: SessionRecord, migration: int) -> bool:
        query = select(decisions.c.version).where(
            decisions.c.session == record.id,
            decisions.c.epoch == record.epoch,
            decisions.c.kind == "migrated",
            decisions.c.numbers["migration"].as_float() == float(migration),
        )
        return (await self._db.execute(query)).first() is not None

    async def note(self, decision: Decision) -> None:
        last = (
            select(decisions)
            .where(decisions.c.session == decision.session)
            .order_by(decisions.c.number.desc())
            .limit(1)
        )
        values = decision.model_dump(mode="json")
        row = (await self._db.execute(last)).mappings().first()
        same = ("epoch", "worker", "kind", "reason")
        if row is not None and row["version"] is None and all(row[name] == values[name] for name in same):
            query = update(decisions).where(decisions.c.number == row["number"])
            await self._db.execute(query.values(numbers=decision.numbers, at=decision.at))
        else:
            await self._db.execute(insert(decisions).values(values))

    async def decisions_of(self, session: str, limit: int) -> list[Decision]:
        query = (
            select(decisions)
            .where(decisions.c.session == session)
            .order_by(decisions.c.number.desc())
            .limit(limit)
        )
        rows = (await self._db.execute(query)).mappings().all()
        return [Decision.model_validate(dict(row)) for row in reversed(rows)]
