"""REST: /v1/audit."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import AwareDatetime
from starlette.requests import HTTPConnection

from turboserve.bus import Bus
from turboserve.contracts.audit import ListAudit
from turboserve.contracts.base import Id
from turboserve.contracts.keys import Scope
from turboserve.gateway.audit.schemas import AuditRecordList
from turboserve.gateway.auth.middleware import needs
from turboserve.gateway.paging import AfterNumber
from turboserve.gateway.problems.schemas import problems
from turboserve.subjects import LIST_AUDIT

router = APIRouter(prefix="/v1/audit", tags=["audit"])


def _bus_of(connection: HTTPConnection) -> Bus:
    found: Bus = connection.app.state.gateway.bus
    return found


Time = Annotated[
    AwareDatetime | None,
    Query(description="RFC 3339, with an offset.", examples=["2026-11-24T00:00:00Z"]),
]


@router.get(
    "",
    dependencies=[needs(Scope.ADMIN)],
    operation_id="list_audit",
    summary="Read the audit log, newest first",
    description="Requests that changed keys, links, pools, costs or owners of sessions, and refused ones of "
    "this kind, of all tenants, by page.",
    responses=problems(401, 422),
)
async def list_audit(
    bus: Annotated[Bus, Depends(_bus_of)],
    tenant: Annotated[
        Id | None, Query(description="Only of senders of this tenant.", examples=["acme"])
    ] = None,
    key: Annotated[
        Id | None, Query(description="Only of the API key with this id.", examples=["2d06c5c4a1b2c3d4"])
    ] = None,
    operation: Annotated[
        Id | None,
        Query(description="Only this operation, by its id in this document.", examples=["create_key"]),
    ] = None,
    refused: Annotated[
        bool | None, Query(description="Only refused requests, or only accepted ones.", examples=[True])
    ] = None,
    since: Time = None,
    until: Time = None,
    limit: Annotated[
        int, Query(ge=1, le=1_000, description="Maximum number of entries on the page.", examples=[100])
    ] = 100,
    after: AfterNumber = None,
) -> AuditRecordList:
    request = ListAudit(
        tenant=tenant,
        key=key,
        operation=operation,
        refused=refused,
        since=_unix(since),
        until=_unix(until),
        limit=limit,
        after=after,
    )
    return AuditRecordList.of(await bus.call(LIST_AUDIT, request))


def _unix(time: datetime | None) -> float | None:
    return None if time is None else max(time.timestamp(), 0.0)
