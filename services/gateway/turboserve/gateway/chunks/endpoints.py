"""REST: /v1/sessions/{session}/chunks."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path

from turboserve.bus import UNREADABLE, Bus, Entry, Owners, next_entry
from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.contracts.errors import ChunkGoneError, NotFoundError
from turboserve.contracts.events import SessionEvent, session_event_from_bytes
from turboserve.contracts.keys import Scope
from turboserve.contracts.sessions import SessionRecord
from turboserve.gateway.auth.middleware import Tenant, needs
from turboserve.gateway.chunks.history import Sources, history
from turboserve.gateway.chunks.schemas import ChunkHistory
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.sessions.parameters import SessionId
from turboserve.subjects import EVENT, OWN

ENTRIES = 500
"""Maximum number of a session's events, and of its owners, that one request reads: the oldest."""

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])


@router.get(
    "/{session}/chunks/{index}",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="get_chunk",
    summary="Read how a chunk came about",
    description="From the request to the screen, with the time of each step. `delivered` and `shown` are "
    "those of this gateway's first viewer, and are forgotten with time. Reading does not count as watching.",
    responses=problems(401, 404, 410, 422),
)
async def read(
    session: SessionId,
    index: Annotated[int, Path(ge=0, le=2**31 - 1, description="Index of the chunk.", examples=[0])],
    tenant: Tenant,
    gateway: Annotated[Gateway, Depends(gateway_of)],
) -> ChunkHistory:
    record = await gateway.sessions.get(tenant, session)
    owners = Owners(gateway.bus, lambda: None)
    found = await _find(gateway, owners, record, index)
    if found is None:
        raise NotFoundError(f"chunk {index} is not generated yet", field="index", limit=record.next_chunk)
    header, entry = found
    before = None
    if index:
        with suppress(ChunkGoneError):
            before = await _find(gateway, owners, record, index - 1)
    delivered_at, shown_at = gateway.timeline.first_viewer(session, index)
    return history(
        Sources(
            record=record,
            header=header,
            payload_bytes=len(entry.data),
            appended_at=_time_of(entry),
            fenced_at=await _fenced_at(gateway.bus, session, header.epoch),
            events=await _events(gateway.bus, session),
            decisions=(await gateway.sessions.decisions(tenant, session)).decisions,
            before=None if before is None else before[0],
            delivered_at=delivered_at,
            shown_at=shown_at,
        )
    )


async def _find(
    gateway: Gateway, owners: Owners, record: SessionRecord, index: int
) -> tuple[ChunkHeader, Entry] | None:
    """Return chunk `index`, which an owner of the session wrote. None: it is not generated yet.

    Raises ChunkGoneError if the log no longer keeps it.
    """
    try:
        start = await gateway.chunks.after(record, index - 1)
    except ChunkGoneError:
        if index > record.next_chunk:
            return None
        raise
    found = await owners.first(record.id, start.sequence + 1)
    return None if found is None or found[0].index != index else found


def _time_of(entry: Entry) -> float | None:
    """When the broker took the entry, Unix seconds."""
    text = entry.headers.get("Nats-Time-Stamp")
    return None if text is None else datetime.fromisoformat(_microseconds(text)).timestamp()


def _microseconds(text: str) -> str:
    """Shorten the nanoseconds of a time, which `datetime` does not read."""
    whole, dot, rest = text.rstrip("Z").partition(".")
    return f"{whole}{dot}{rest[:6]}+00:00"


async def _fenced_at(bus: Bus, session: str, epoch: int) -> float | None:
    position = 0
    for _ in range(ENTRIES):
        entry = await next_entry(bus, OWN.stream, OWN.of(session), position + 1)
        if entry is None:
            return None
        position = entry.sequence
        with suppress(*UNREADABLE):
            if Ownership.from_bytes(entry.data).epoch == epoch:
                return _time_of(entry)
    return None


async def _events(bus: Bus, session: str) -> list[SessionEvent]:
    """Return the oldest events that the log keeps."""
    found: list[SessionEvent] = []
    position = 0
    for _ in range(ENTRIES):
        entry = await next_entry(bus, EVENT.stream, EVENT.of(session), position + 1)
        if entry is None:
            return found
        position = entry.sequence
        with suppress(*UNREADABLE):
            found.append(session_event_from_bytes(entry.data))
    return found
