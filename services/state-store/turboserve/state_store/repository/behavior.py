"""Reads what rows say of the behavior of a model's sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Double,
    Text,
    and_,
    bindparam,
    case,
    not_,
    or_,
    select,
    union_all,
)

from turboserve.contracts.sessions import Phase
from turboserve.state_store.core.session_spans import ENDED_LIMIT, LIVE_LIMIT, SessionTimes
from turboserve.state_store.repository.sessions import LIVE
from turboserve.state_store.tables import sessions


def session_times_query(holds: ColumnElement[bool], waits: ColumnElement[bool]) -> CompoundSelect[Any]:
    """Return the query of the sessions of `model` that live or have left after `since`, by these parameters.

    `holds`, `waits`: conditions of sessions that hold a slot, or wait for one.
    """
    model, since = bindparam("model", type_=Text), bindparam("since", type_=Double)
    idle = and_(sessions.c.phase == Phase.SUSPENDED.value, not_(waits))
    left_at = case((sessions.c.ended_at.is_not(None), sessions.c.ended_at), (idle, sessions.c.suspended_at))
    columns = (
        sessions.c.id,
        sessions.c.tenant,
        sessions.c.created_at,
        left_at.label("left_at"),
        sessions.c.control_seq,
        sessions.c.next_chunk,
        holds.label("holds_slot"),
        sessions.c.ended_at.is_not(None).label("ended"),
    )
    # Each part has an index of its own: those of unpurged, of purged and of live sessions.
    ended = (
        select(*columns)
        .where(sessions.c.ended_at > since, purged, sessions.c.model == model)
        .order_by(sessions.c.ended_at.desc(), sessions.c.id)
        .limit(ENDED_LIMIT)
        .subquery()
        for purged in (sessions.c.purged_at.is_(None), sessions.c.purged_at.is_not(None))
    )
    there = or_(not_(idle), sessions.c.suspended_at > since)
    live = select(*columns).where(LIVE, sessions.c.model == model, there).limit(LIVE_LIMIT + 1).subquery()
    return union_all(*(select(*part.c) for part in (*ended, live)))


def session_times(rows: Sequence[Sequence[Any]]) -> tuple[SessionTimes, ...] | None:
    """Parse the rows of `session_times_query`. None: more sessions live than are read."""
    found = sorted((SessionTimes(*row) for row in rows), key=lambda row: row.session)
    return None if sum(not row.ended for row in found) > LIVE_LIMIT else tuple(found)
