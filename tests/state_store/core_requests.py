"""Requests to the rules of sessions and migrations, with defaults for fields that a test does not set."""

from __future__ import annotations

from turboserve.contracts.requests import (
    BeginMigration,
    CommitMigration,
    CreateSession,
    PlaceSession,
)
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core.workers import Slots

REQUEST = CreateSession(id="s1", tenant="t", model="m", prompt="a red circle", seed=1)
FREE = Slots("m", WorkerPhase.READY, capacity=2, used=0)


def paused_record(record: SessionRecord, now: float) -> SessionRecord:
    """Return the row after a pause that changes it."""
    change = rules.pause(record, now)
    assert change is not None
    return change.record


def place_request(record: SessionRecord, worker: str = "w1", version: int | None = None) -> PlaceSession:
    decision = Decision(session=record.id, epoch=0, kind="place", reason="")
    expected = record.version if version is None else version
    return PlaceSession(session=record.id, expected_version=expected, worker=worker, decision=decision)


def begin_request(record: SessionRecord, target: str = "w2", version: int | None = None) -> BeginMigration:
    decision = Decision(session=record.id, epoch=0, kind="migrate", reason="less loaded")
    expected = record.version if version is None else version
    return BeginMigration(session=record.id, expected_version=expected, target=target, decision=decision)


def commit_request(record: SessionRecord, **fields: object) -> CommitMigration:
    """Return the commit of the migration that `record` names (or of one that never existed)."""
    values = {"session": record.id, "migration": record.migration or 1, "target": record.target or "w2"}
    values |= {"next_chunk": record.next_chunk, "digest": "d1"}
    return CommitMigration.model_validate(values | fields)


def active(worker: str = "w1") -> SessionRecord:
    record = rules.create(REQUEST, 1.0).record
    return rules.place(record, place_request(record, worker), FREE, 2.0, 5.0).record
