"""Requests to the state store, and their answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turboserve.contracts.base import Contract, Count, Id, Note, Text
from turboserve.contracts.chunks import ChunkIndex
from turboserve.contracts.control_declarations import ControlName
from turboserve.contracts.controls import ControlValue, InitialValues
from turboserve.contracts.fidelity import LeadSeconds, QualityLimits
from turboserve.contracts.leading import PoolFenced, TermFenced
from turboserve.contracts.sessions import (
    METADATA_KEYS_LIMIT,
    SEED_LIMIT,
    Decision,
    Digest,
    MetadataValue,
    Numbers,
    Phase,
    Prompt,
    SessionRecord,
)
from turboserve.contracts.workers import LoadReport, WorkerRecord


class CreateSession(Contract):
    """gateway → state store: create a session. Refused with `no_capacity` (pool full) or `unknown_model`."""

    id: Id
    """Chosen by the gateway, so that a repeated request creates one session."""
    tenant: Id
    model: Id
    prompt: Prompt
    seed: int = Field(ge=0, le=SEED_LIMIT)
    metadata: dict[Text, MetadataValue] = Field(default={}, max_length=METADATA_KEYS_LIMIT)
    controls: InitialValues = {}
    """Values of the model's controls. A repeated request may have others: they may have changed since."""
    quality: QualityLimits | None = None
    """See `SessionRecord`. A repeated request may have other limits: they may have changed since."""
    max_lead_s: LeadSeconds | None = None
    """See `quality`."""
    recording: Id | None = None
    """Id of the recording that starts with the session, once. None: the session is not recorded."""
    key: Id | None = None
    """The API key of the request. None: it needed none."""


class SessionRef(Contract):
    """A session, restricted to a tenant. `tenant` None is for services, which see all sessions."""

    session: Id
    tenant: Id | None = None


class ListSessions(Contract):
    """gateway, scheduler → state store: list sessions. Answered with `SessionPage`."""

    tenant: Id | None = None
    phases: tuple[Phase, ...] = Field(default=(), max_length=len(Phase))
    """Phases to list. Empty: all phases."""
    limit: int = Field(default=100, ge=1, le=1_000)
    after: Text | None = None
    """The `next` of the previous page."""


class SessionPage(Contract):
    """One page of sessions. `next` None: the last page."""

    sessions: tuple[SessionRecord, ...]
    next: Text | None = None


class SubmitPrompt(SessionRef):
    """gateway → state store: change the prompt. Answered with `PromptReceipt`."""

    prompt_id: Id
    """Chosen by the gateway, so that a repeated request returns the first one's receipt."""
    prompt: Prompt
    drop_buffer: bool = False
    """Whether viewers discard the video before the first chunk that shows the prompt."""


class SetControl(SessionRef):
    """gateway → state store: set a control that the session's model declares. Answer: `ControlReceipt`."""

    control_id: Id
    """As `SubmitPrompt.prompt_id`."""
    name: ControlName
    value: ControlValue = None
    drop_buffer: bool = False
    """As `SubmitPrompt.drop_buffer`."""


class ChangeSession(SessionRef):
    """gateway → state store: change what the session's owner allows. Answered with the row."""

    changes: tuple[Literal["quality", "max_lead_s"], ...] = Field(default=(), max_length=8)
    """Fields to set. The others stay."""
    quality: QualityLimits | None = None
    max_lead_s: LeadSeconds | None = None


class EndSession(SessionRef):
    """gateway → state store: end the session."""

    reason: Note = "ended by the user"


class FailSession(Contract):
    """worker → state store: the session cannot continue, for the given reason."""

    session: Id
    epoch: Count
    worker: Id
    reason: Note


class PlaceSession(TermFenced):
    """scheduler → state store: one compare-and-set that changes the owner and raises the epoch.

    Refused with:

    - `conflict` if the row's version is not `expected_version`
    - `no_capacity` if the worker is full
    - `worker_gone` if the worker is gone
    - `invalid_input` if the worker serves another model, or weights other than those of the session's chunks
    """

    session: Id
    expected_version: Count
    worker: Id
    decision: Decision
    other_weights: bool = False
    """Whether the worker may have weights other than those of the session's chunks. The session then
    continues from its latents, and may look different from there on."""


class BeginMigration(TermFenced):
    """scheduler → state store: begin the migration of the session to `target`.

    A running session becomes `migrating`, keeps running at the source, and reserves a slot on the target. A
    suspended session stays suspended and needs no slot. Refused with:

    - `conflict` if the row's version is not `expected_version`
    - `transition_not_allowed` unless the session is active or suspended, has an owner, and does not migrate
      yet
    - `invalid_input` if the target is the owner, or serves another model or other weights
    - `no_capacity` or `worker_gone` as a placement
    """

    session: Id
    expected_version: Count
    target: Id
    decision: Decision


class CommitMigration(TermFenced):
    """scheduler → state store: the target has verified the state and becomes the owner under the next epoch.

    Refused with:

    - `migration_over` if `migration` is not the current migration
    - `stale_state` if the log has a chunk that is newer than the migrated state
    - `worker_gone` if the target is gone
    """

    session: Id
    migration: Count
    target: Id
    next_chunk: Count
    """Index of the chunk that the migrated state generates next."""
    digest: Digest | None = None
    numbers: Numbers = {}
    """Stored with the decision: bytes copied, seconds."""


class AbandonMigration(TermFenced):
    """scheduler → state store: abandon the migration. Answered with the row, even if it is over already."""

    session: Id
    migration: Count
    reason: Note
    release: bool = False
    """Whether the source stops being the owner, because it has no state of the suspended session. The session
    then has no owner until it is placed again. Ignored unless the session is suspended."""


class MigrateSession(SessionRef):
    """gateway → scheduler: migrate the session to another worker, as an operator requested.

    Refused with:

    - `not_found` if the worker does not exist
    - `transition_not_allowed` if the session does not run, or migrates already
    - `invalid_input` if the worker is the owner, or serves another model
    - `no_capacity` if the worker is full
    """

    worker: Id | None = None
    """The target. None: the scheduler chooses the best worker."""


class MigrationAccepted(Contract):
    """The migration has begun: its row and decision. The session's events report how the migration ends."""

    record: SessionRecord
    decision: Decision


class ReleaseSession(TermFenced):
    """scheduler → state store: remove the owner of a suspended session until the session is placed again.

    Used if a worker is draining and no other worker can take its state of the session. The session is
    rebuilt from its latents when it is resumed. Answered with the row if the session has no owner already.
    Refused with:

    - `conflict` if the row's version is not `expected_version`
    - `transition_not_allowed` if the session is not suspended
    """

    session: Id
    expected_version: Count
    decision: Decision


class NoteDecision(TermFenced):
    """scheduler → state store: store a decision that changes no row, such as to wait."""

    decision: Decision


class SuspendIdle(TermFenced):
    """scheduler → state store: suspend a session that no viewer has watched for `TURBOSERVE_IDLE_AFTER_S`.

    Refused with `conflict` if the row's version is not `expected_version`, or if a viewer watches again.
    """

    session: Id
    expected_version: Count


class Renew(Contract):
    """worker → state store, every `heartbeat_s`: renew the lease and report. Answered with `Renewal`."""

    load: LoadReport


class WorkerGone(PoolFenced):
    """scheduler, autoscaler → state store: declare a worker gone, because it is dead or released."""

    worker: Id
    reason: Note
    term: Count | None = None
    """The scheduler's term. None: the sender is the autoscaler. Refused with `stale_term`."""
    renewed_at: float | None = None
    """`renewed_at` of the silent worker's row, as read by the sender. Refused with `conflict` if the worker
    has renewed since, or if its lease may still be valid. None: the worker is known to have ended."""


class DrainWorker(PoolFenced):
    """autoscaler → state store: place no further sessions on this worker."""

    worker: Id


class ListWorkers(Contract):
    """gateway, scheduler, autoscaler → state store: list workers. Answered with `WorkerPage`."""

    include_gone: bool = False


class WorkerPage(Contract):
    """The workers of a listing."""

    workers: tuple[WorkerRecord, ...]


class DecisionPage(Contract):
    """The newest decisions of the scheduler about one session."""

    decisions: tuple[Decision, ...]


class GetLatents(Contract):
    """worker → state store: read the stored latents of chunk `index`.

    Answered with `LatentsHeader` and raw bytes. Refused with `forbidden` unless the session's row names
    `worker` as its owner.
    """

    session: Id
    index: ChunkIndex
    worker: Id | None = None


class Done(Contract):
    """Confirms a request. Carries no data."""
