"""What was asked of a session and what was decided about it."""

from __future__ import annotations

from sqlalchemy import insert, select, update
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.sessions import Decision, PromptReceipt, SessionRecord
from turboserve.state_store.tables import controls, decisions


async def insert_prompt(db: AsyncConnection, receipt: PromptReceipt) -> None:
    values = receipt.model_dump(exclude={"control_seq"}) | {"seq": receipt.control_seq}
    await db.execute(insert(controls).values(kind="prompt", **values))


async def prompt_of_event(db: AsyncConnection, event_id: str) -> PromptReceipt | None:
    row = (await db.execute(select(controls).where(controls.c.event_id == event_id))).mappings().first()
    return None if row is None else _receipt(row)


async def mark_applied(
    db: AsyncConnection, session: str, control_seq: int, chunk_index: int, now: float
) -> list[PromptReceipt]:
    """Prompts up to `control_seq` that no chunk was made under before; each is returned once, in order."""
    query = (
        update(controls)
        .where(controls.c.session == session, controls.c.seq <= control_seq, controls.c.applied_at.is_(None))
        .values(applied_at=now, chunk_index=chunk_index)
        .returning(controls)
    )
    rows = (await db.execute(query)).mappings().all()
    return sorted((_receipt(row) for row in rows), key=lambda receipt: receipt.control_seq)


def _receipt(row: RowMapping) -> PromptReceipt:
    return PromptReceipt.model_validate({**row, "control_seq": row["seq"]})


async def decided(db: AsyncConnection, record: SessionRecord, version: int, worker: str) -> bool:
    """Whether the row's `version` was made by placing it on `worker`, under the epoch it still has."""
    query = select(decisions.c.version).where(
        decisions.c.session == record.id,
        decisions.c.version == version,
        decisions.c.epoch == record.epoch,
        decisions.c.worker == worker,
    )
    return (await db.execute(query)).first() is not None


async def moved(db: AsyncConnection, record: SessionRecord, move: int) -> bool:
    """Whether the epoch that the row still has was made by committing this move."""
    query = select(decisions.c.version).where(
        decisions.c.session == record.id,
        decisions.c.epoch == record.epoch,
        decisions.c.kind == "moved",
        decisions.c.numbers["move"].as_float() == float(move),
    )
    return (await db.execute(query)).first() is not None


async def note(db: AsyncConnection, decision: Decision) -> None:
    """Keep a decision that changes no row. The same as last time is kept once, with its newest numbers."""
    last = (
        select(decisions)
        .where(decisions.c.session == decision.session)
        .order_by(decisions.c.number.desc())
        .limit(1)
    )
    values = decision.model_dump(mode="json")
    row = (await db.execute(last)).mappings().first()
    same = ("epoch", "worker", "kind", "reason")
    if row is not None and row["version"] is None and all(row[name] == values[name] for name in same):
        query = update(decisions).where(decisions.c.number == row["number"])
        await db.execute(query.values(numbers=decision.numbers, at=decision.at))
    else:
        await db.execute(insert(decisions).values(values))


async def decisions_of(db: AsyncConnection, session: str, limit: int) -> list[Decision]:
    """The newest, in the order in which they were made."""
    query = (
        select(decisions)
        .where(decisions.c.session == session)
        .order_by(decisions.c.number.desc())
        .limit(limit)
    )
    rows = (await db.execute(query)).mappings().all()
    return [Decision.model_validate(dict(row)) for row in reversed(rows)]
