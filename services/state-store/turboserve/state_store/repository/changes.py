"""Writes changes of sessions: the row, its events and the decision, in one statement that is built once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import CTE, BindParameter, Insert, Table, Update, bindparam, func, insert, null, update
from sqlalchemy.ext.asyncio import AsyncConnection

from turboserve.contracts.events import SessionEvent
from turboserve.contracts.sessions import Decision, Phase
from turboserve.state_store.core.change import Change
from turboserve.state_store.core.tenants import Tenant, controls_bytes
from turboserve.state_store.ports.records import SESSION_CHANGING, SESSION_FIELDS
from turboserve.state_store.publish.outbox import outbox_values
from turboserve.state_store.repository.admission import WRITE_TENANT, tenant_values
from turboserve.state_store.tables import decisions, outbox, sessions

_CREATED = {*SESSION_FIELDS}
_CHANGED = {*SESSION_CHANGING}
_DECISION = (*Decision.model_fields, "version")
_EVENT = tuple(column.name for column in outbox.columns if not column.primary_key)


@dataclass(frozen=True)
class _Shape:
    """What a change writes besides the columns that every change writes."""

    events: int
    decides: bool
    ends: bool
    suspended: bool
    writes_key: bool
    """Whether the key of the session's migration is written."""
    charges: bool
    """Whether the row of the session's tenant is written."""


class SqlChanges:
    """`ChangeRepository` in one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._db = connection

    async def create(self, change: Change, tenant: Tenant | None = None) -> None:
        record = change.record
        values = _named("row", record.model_dump(mode="json", include=_CREATED))
        values["row_first_prompt"] = record.prompt
        values["row_controls_bytes"] = controls_bytes(record.controls)
        query = _creation(len(change.events), tenant is not None)
        await self._db.execute(query, values | _of_events(change.events) | _of_tenant(tenant))

    async def write(
        self, change: Change, *, migration_key: str | None = None, tenant: Tenant | None = None
    ) -> None:
        record, decision = change.record, change.decision
        shape = _Shape(
            events=len(change.events),
            decides=decision is not None,
            ends=record.phase.ended,
            suspended=record.phase is Phase.SUSPENDED,
            writes_key=record.migration is None or migration_key is not None,
            charges=tenant is not None,
        )
        values = _named("row", record.model_dump(mode="json", include=_CHANGED))
        values |= {"row_id": record.id, "row_migration_key": migration_key}
        if decision is not None:
            values |= _named("decision", decision.model_dump(mode="json"))
            values["decision_version"] = record.version
        values |= _of_events(change.events) | _of_tenant(tenant)
        await self._db.execute(_written(shape), values)


def _named(prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _of_events(events: Sequence[SessionEvent]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, event in enumerate(events):
        found |= _named(f"event{number}", outbox_values(event))
    return found


def _of_tenant(tenant: Tenant | None) -> dict[str, Any]:
    return {} if tenant is None else {**tenant_values(tenant)}


def _bound(table: Table, prefix: str, names: Iterable[str]) -> dict[str, BindParameter[Any]]:
    return {name: bindparam(f"{prefix}_{name}", type_=table.c[name].type) for name in names}


# SQLAlchemy takes longer to build such a statement and its cache key than to execute it.


@cache
def _creation(events: int, charges: bool) -> Insert | Update:
    row = insert(sessions).values(
        _bound(sessions, "row", sorted({*_CREATED, "first_prompt", "controls_bytes"}))
    )
    return _with_events(row, _charge(charges), events)


def _charge(charges: bool) -> list[CTE]:
    return [WRITE_TENANT.cte("charge")] if charges else []


@cache
def _written(shape: _Shape) -> Insert | Update:
    values: dict[str, Any] = {**_bound(sessions, "row", sorted(_CHANGED))}
    at = values["updated_at"]
    if shape.ends:
        values["ended_at"] = at
    values["suspended_at"] = func.coalesce(sessions.c.suspended_at, at) if shape.suspended else null()
    if shape.writes_key:
        values |= _bound(sessions, "row", ["migration_key"])
    row = update(sessions).where(sessions.c.id == bindparam("row_id")).values(values)
    parts = _charge(shape.charges)
    if shape.decides:
        parts.append(insert(decisions).values(_bound(decisions, "decision", _DECISION)).cte("decision"))
    return _with_events(row, parts, shape.events)


def _with_events(row: Insert | Update, parts: list[CTE], events: int) -> Insert | Update:
    """Build a statement that writes the row, `parts` and the events, numbered in their order."""
    if not events:
        return row.add_cte(*parts)
    values = [_bound(outbox, f"event{number}", _EVENT) for number in range(events)]
    return insert(outbox).values(values[0] if events == 1 else values).add_cte(row.cte("row"), *parts)
