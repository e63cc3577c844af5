"""Requests to the state store, and their answers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from turboserve.contracts.base import Contract, Count, Id, Note, Text
from turboserve.contracts.chunks import ChunkIndex
from turboserve.contracts.leading import TermFenced
from turboserve.contracts.sessions import (
    METADATA_KEYS_LIMIT,
    METADATA_VALUE_LIMIT,
    SEED_LIMIT,
    Decision,
    Digest,
    Numbers,
    Phase,
    Prompt,
    SessionRecord,
)
from turboserve.contracts.workers import LoadReport, WorkerRecord

MetadataValue = Annotated[Text, Field(max_length=METADATA_VALUE_LIMIT)]


class CreateSession(Contract):
    """gateway → state store. Refused with `no_capacity` (pool full) or `unknown_model`."""

    id: Id
    """Chosen by the gateway, so that a repeated request creates one session."""
    tenant: Id
    model: Id
    prompt: Prompt
    seed: int = Field(ge=0, le=SEED_LIMIT)
    metadata: dict[Text, MetadataValue] = Field(default={}, max_length=METADATA_KEYS_LIMIT)


class SessionRef(Contract):
    """A session as its tenant names it; `tenant` None is for services, which see all."""

    session: Id
    tenant: Id | None = None


class ListSessions(Contract):
    tenant: Id | None = None
    phases: tuple[Phase, ...] = Field(default=(), max_length=len(Phase))
    """Empty: any."""
    limit: int = Field(default=100, ge=1, le=1_000)
    after: Text | None = None
    """The `next` of the page before."""


class SessionPage(Contract):
    sessions: tuple[SessionRecord, ...]
    next: Text | None = None


class SubmitPrompt(SessionRef):
    event_id: Id
    """Chosen by the gateway: a repeated request is answered with the first one's receipt."""
    prompt: Prompt


class EndSession(SessionRef):
    reason: Note = "ended by its user"


class FailSession(Contract):
    """worker → state store: this session cannot go on, and here is why."""

    session: Id
    epoch: Count
    worker: Id
    reason: Note


class PlaceSession(TermFenced):
    """scheduler → state store: one compare-and-set that changes the owner and raises the epoch.

    Refused with `conflict` if the row's version is not `expected_version`, with `no_capacity` if the worker
    is full, with `worker_gone` if it is not alive, with `invalid_input` if it serves another model, or other
    weights than the session's chunks were made with.
    """

    session: Id
    expected_version: Count
    worker: Id
    decision: Decision
    other_weights: bool = False
    """The worker may have other weights than those that made the session's chunks: the session goes on from
    its latents, and may look different from there on."""


class BeginMove(TermFenced):
    """scheduler → state store: the session is to move to `target`; a slot is counted there from now on.

    A running one becomes `migrating` and goes on where it is; a suspended one stays suspended, and needs no
    slot. Refused with `conflict` if the row's version is not `expected_version`, `transition_not_allowed` if
    it does not run or moves already, `invalid_input` if the target is its worker or serves another model or
    other weights, `no_capacity` or `worker_gone` as a placement.
    """

    session: Id
    expected_version: Count
    target: Id
    decision: Decision


class CommitMove(TermFenced):
    """scheduler → state store: the target has verified the state; it owns the session under the next epoch.

    Refused with `move_over` if `move` is not the one under way, `stale_state` if the log has a chunk that
    the moved state does not know of, `worker_gone` if the target is gone.
    """

    session: Id
    move: Count
    target: Id
    next_chunk: Count
    """Chunk that the moved state makes next."""
    digest: Digest | None = None
    numbers: Numbers = {}
    """Kept with the decision: bytes moved, seconds."""


class AbandonMove(TermFenced):
    """scheduler → state store: the session stays where it is. Answered with the row if the move is over."""

    session: Id
    move: Count
    reason: Note
    release: bool = False
    """The source has no state of a suspended session: it stops being the owner, and no worker is one until
    the session is placed again. Ignored unless the session is suspended."""


class MoveSession(SessionRef):
    """gateway → scheduler: an operator wants the session on another worker.

    Refused with `not_found` (no such worker), `transition_not_allowed` (it does not run, or moves already),
    `invalid_input` (it is there already, or the worker serves another model), `no_capacity`.
    """

    worker: Id | None = None
    """None: the one that suits best."""


class MoveAccepted(Contract):
    """The move has begun: the row and the decision. Whether it is done, the session's events tell."""

    record: SessionRecord
    decision: Decision


class ReleaseSession(TermFenced):
    """scheduler → state store: no worker owns the suspended session until it is placed again.

    For a worker that is to be emptied and whose state of the session no other worker can take. The session is
    rebuilt from its latents when it is resumed. Answered with the row if no worker owns it. Refused with
    `conflict` if the row's version is not `expected_version`, `transition_not_allowed` unless it is
    suspended.
    """

    session: Id
    expected_version: Count
    decision: Decision


class NoteDecision(TermFenced):
    """scheduler → state store: a decision that changes no row (to wait), kept beside those that do."""

    decision: Decision


class SuspendIdle(TermFenced):
    """scheduler → state store: nobody has watched for `idle_after`; suspend if the row is unchanged."""

    session: Id
    expected_version: Count


class Renew(Contract):
    """worker → state store, every `heartbeat_s`: I live, this is what I hold. Answered with `Renewal`."""

    load: LoadReport


class WorkerGone(Contract):
    """scheduler, autoscaler → state store: this worker is dead or released."""

    worker: Id
    reason: Note
    term: Count | None = None
    """The scheduler's; None from others, who need not lead. Refused with `stale_term`."""
    renewed_at: float | None = None
    """Of its row, as read by who takes its silence for death: refused with `conflict` if it has renewed
    since, or if its lease may still hold. None: it is known to have ended."""


class DrainWorker(Contract):
    """autoscaler → state store: place nothing more on this worker."""

    worker: Id


class ListWorkers(Contract):
    include_gone: bool = False


class WorkerPage(Contract):
    workers: tuple[WorkerRecord, ...]


class DecisionPage(Contract):
    decisions: tuple[Decision, ...]


class GetLatents(Contract):
    """worker → state store: the kept latents of chunk `index`; answered with `LatentsHeader`, raw bytes.

    Refused with `forbidden` unless the session's row names `worker` as its owner.
    """

    session: Id
    index: ChunkIndex
    worker: Id | None = None


class Done(Contract):
    """It is done, and there is nothing to say about it."""
