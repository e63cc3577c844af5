"""Puts the times of one chunk, which several processes noted, into one list of hops. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.events import (
    ControlAccepted,
    PromptAccepted,
    SessionEvent,
    SessionMigrated,
    SessionPlaced,
)
from turboserve.contracts.sessions import Decision, SessionRecord
from turboserve.gateway.chunks.schemas import ChunkHistory, Hop, HopName
from turboserve.gateway.public import timestamp
from turboserve.gateway.sessions.migration_schemas import SessionDecision

STATE_STORE, SCHEDULER, BROKER, GATEWAY = "state-store", "scheduler", "broker", "gateway"
CHOOSING = frozenset({"place", "resume", "recover", "rebuild", "migrate"})
"""Kinds of decisions that name a new owner."""


@dataclass(frozen=True)
class Sources:
    """What is known about one chunk. Times are Unix seconds; None: not known."""

    record: SessionRecord
    header: ChunkHeader
    payload_bytes: int
    appended_at: float | None
    """When the log took the chunk, by the broker's clock."""
    fenced_at: float | None
    """When the log took the owner of the chunk's epoch, by the broker's clock."""
    events: Sequence[SessionEvent]
    decisions: Sequence[Decision]
    before: ChunkHeader | None
    """Header of the chunk before. None: there is none, or the log does not keep it."""
    delivered_at: float | None = None
    shown_at: float | None = None


def history(found: Sources) -> ChunkHistory:
    """Return the history of a chunk. Only the first chunk of an ownership has the hops of its placement."""
    header = found.header
    decision = _decision(found) if _is_first(header) else None
    hops: list[Hop] = []
    for name, at, by in _times(found, decision):
        if at is not None:
            since = None if not hops else round(at - hops[-1].at.timestamp(), 6)
            hops.append(Hop(name=name, at=timestamp(at), by=by, since_s=since))
    return ChunkHistory(
        session=header.session,
        index=header.index,
        epoch=header.epoch,
        worker=header.worker,
        control_seq=header.control_seq,
        bytes=found.payload_bytes,
        compute_s=header.compute_s,
        slack_s=header.slack_s,
        decision=None if decision is None else SessionDecision.of(decision),
        total_s=round((hops[-1].at - hops[0].at).total_seconds(), 6),
        hops=hops,
    )


def _is_first(header: ChunkHeader) -> bool:
    """Whether the chunk is the first of its ownership."""
    return header.index == (header.began or 0)


def _decision(found: Sources) -> Decision | None:
    """Return the decision that made the chunk's worker the owner: the newest before its placement."""
    placed = _placed_at(found)
    worker = found.header.worker
    chosen = [one for one in found.decisions if one.kind in CHOOSING and one.worker == worker]
    before = [one for one in chosen if placed is None or one.at <= placed + 1.0]
    return max(before, key=lambda one: one.at, default=None)


def _placed_at(found: Sources) -> float | None:
    for event in found.events:
        if isinstance(event, SessionPlaced | SessionMigrated) and event.record.epoch == found.header.epoch:
            return event.at
    return None


def _prompted_at(found: Sources) -> float | None:
    """When the prompt or control was accepted that the chunk is the first to show. None: there is none."""
    header, before = found.header, found.before
    if before is not None and before.control_seq >= header.control_seq:
        return None
    for event in found.events:
        if (
            isinstance(event, PromptAccepted | ControlAccepted)
            and event.record.control_seq == header.control_seq
        ):
            return event.at
    return None


def _times(found: Sources, decision: Decision | None) -> Iterable[tuple[HopName, float | None, str]]:
    header = found.header
    if header.index == 0:
        yield HopName.CREATED, found.record.created_at, STATE_STORE
    yield HopName.PROMPTED, _prompted_at(found), STATE_STORE
    if _is_first(header):
        yield HopName.DECIDED, None if decision is None else decision.at, SCHEDULER
        yield HopName.PLACED, _placed_at(found), STATE_STORE
        yield HopName.FENCED, found.fenced_at, BROKER
    if header.stages is not None:
        stages = header.stages
        for name, age_s in (
            (HopName.DUE, stages.due_s),
            (HopName.STARTED, stages.started_s),
            (HopName.DENOISED, stages.denoised_s),
            (HopName.DECODED, stages.decoded_s),
            (HopName.PACKAGED, stages.packaged_s),
        ):
            yield name, header.published_at - age_s, header.worker
    yield HopName.PUBLISHED, header.published_at, header.worker
    yield HopName.APPENDED, found.appended_at, BROKER
    yield HopName.DELIVERED, found.delivered_at, GATEWAY
    yield HopName.SHOWN, found.shown_at, GATEWAY
