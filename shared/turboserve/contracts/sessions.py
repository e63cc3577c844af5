"""Sessions: their row, their phases, prompts and decisions."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from turboserve.contracts.base import Contract, Count, Id, Note, Text, Traceparent, UnixSeconds
from turboserve.contracts.control_declarations import ControlName
from turboserve.contracts.controls import ControlValue, ControlValues
from turboserve.contracts.fidelity import LeadSeconds, QualityLimits

PROMPT_LIMIT = 2_000
"""Maximum number of characters in a prompt."""
METADATA_KEYS_LIMIT = 16
METADATA_VALUE_LIMIT = 512
SEED_LIMIT = 2**63 - 1

Prompt = Annotated[Text, Field(min_length=1, max_length=PROMPT_LIMIT)]
MetadataValue = Annotated[Text, Field(max_length=METADATA_VALUE_LIMIT)]
Digest = Annotated[Text, Field(max_length=128)]
"""Digest of a session's state."""
WeightsDigest = Annotated[Text, Field(max_length=64)]
"""Digest of a worker's model: configuration and weights of all networks. A session's state can continue only
on a worker with an equal digest."""
Numbers = Annotated[dict[Annotated[Text, Field(max_length=64)], float], Field(max_length=64)]
"""The figures behind a decision, by name."""


SLOT_COST = 10_000
"""Cost of a slot for a session of weight 1."""


class RateLeft(Contract):
    """What a request has left of one limit per time. Gateways show it in the headers RateLimit-*."""

    name: Id
    """Name of the limit, as errors have it in `field`."""
    limit: float = Field(ge=0)
    """Units in `window_s`."""
    window_s: float = Field(ge=0)
    left: float = Field(ge=0)
    """Units left."""
    reset_s: float = Field(ge=0)
    """Seconds until the whole limit is available again, without further requests."""


class Phase(StrEnum):
    """Where a session is in its life."""

    REQUESTED = "requested"
    ACTIVE = "active"
    MIGRATING = "migrating"
    SUSPENDED = "suspended"
    TERMINATED = "terminated"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (Phase.TERMINATED, Phase.FAILED)

    @property
    def holds_slot(self) -> bool:
        """Whether a session in this phase counts against the capacity of its worker."""
        return self is _ACTIVE or self is _MIGRATING


# Python 3.11 takes ten times as long for a member of an enumeration as for a global name.
_ACTIVE, _MIGRATING = Phase.ACTIVE, Phase.MIGRATING

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.REQUESTED: frozenset({Phase.ACTIVE, Phase.SUSPENDED, Phase.TERMINATED, Phase.FAILED}),
    Phase.ACTIVE: frozenset({Phase.ACTIVE, Phase.MIGRATING, Phase.SUSPENDED, Phase.TERMINATED, Phase.FAILED}),
    Phase.MIGRATING: frozenset({Phase.ACTIVE, Phase.SUSPENDED, Phase.TERMINATED, Phase.FAILED}),
    Phase.SUSPENDED: frozenset({Phase.SUSPENDED, Phase.ACTIVE, Phase.TERMINATED, Phase.FAILED}),
    Phase.TERMINATED: frozenset(),
    Phase.FAILED: frozenset(),
}
"""All transitions that the state store allows. ACTIVE → ACTIVE is a change of owner."""


class Activity(StrEnum):
    """What the user wants of the session, independent of its current phase."""

    WATCHING = "watching"
    PAUSED = "paused"
    IDLE = "idle"
    """No viewer has watched for `TURBOSERVE_IDLE_AFTER_S`."""


class SessionRecord(Contract):
    """One session's row: the authoritative record of its owner, phase and progress."""

    id: Id
    tenant: Id
    model: Id
    prompt: Text
    """The newest accepted prompt."""
    seed: int = Field(ge=0, le=SEED_LIMIT)
    metadata: dict[Text, Text] = {}
    phase: Phase
    activity: Activity = Activity.WATCHING
    version: Count
    """Raised by every change. A compare-and-set compares it."""
    epoch: Count
    """The number of the current ownership. 0: no worker has owned the session yet."""
    worker: Id | None = None
    """The owner. For a suspended session, the worker that holds its state in host memory."""
    target: Id | None = None
    """The target of the current migration. Set only while `migrating`, or while a `suspended` session
    migrates. `worker` and `epoch` stay those of the source until the commit."""
    migration: Count | None = None
    """Number of the current migration: the row's version at its start, hence unique per session."""
    own_revision: Count | None = None
    """Stream sequence of the newest `own.<session>`. The fence compares it."""
    log_losses: Count = 0
    """How often the log has lost the fence of a current owner. The owner reads the log's end again after each
    loss, whichever rows it missed."""
    next_chunk: Count = 0
    """Index of the first chunk that the log has not accepted, as far as the store has read the log."""
    controls: ControlValues = {}
    """The newest accepted values of typed controls, by name. The model chooses the values of the others."""
    control_seq: Count = 0
    """Number of the newest accepted prompt or control. `prompt` and `controls` are their result."""
    applied_control_seq: Count = 0
    """Number of the newest prompt or control that was in effect for an accepted chunk."""
    event_sequence: Count = 0
    """Number of the session's newest event. Events of a session have the numbers 1, 2, 3, …"""
    drop_buffer_seq: Count = 0
    """Number of the newest control whose client discards the video before it. 0: none."""
    quality: QualityLimits | None = None
    """None: the session's chunks may be as low as the floor of the worker's profile."""
    max_lead_s: LeadSeconds | None = None
    """Largest lead of the session, seconds. None: the worker's (`TURBOSERVE_MAX_LEAD_S`)."""
    recording: Id | None = None
    """The recording that runs. None: the session is not recorded."""
    state_digest: Digest | None = None
    weights_digest: WeightsDigest | None = None
    """Weights digest of the worker that owns the session or owned it last. None: no worker has owned the
    session yet, or that worker did not report a digest."""
    playhead_s: float = 0.0
    """Last reported playhead, seconds of media time."""
    unwatched_s: float | None = None
    """Seconds without a viewer and without a change of the row, as of this answer. None: unknown."""
    requested_at: UnixSeconds | None = None
    """When the creation or the newest resumption was requested."""
    rates: tuple[RateLeft, ...] = Field(default=(), max_length=8)
    """What the creation has left of the limits per time. Only in the answer to it."""
    key: Id | None = None
    """The API key that created the session. None: it needed none."""
    weight: float = Field(default=1.0, ge=0.01, le=100)
    """Weight among the sessions that wait for slots: `KeyLimits.weight` of `key`."""
    waiting_s: float | None = Field(default=None, ge=0)
    """Seconds since `requested_at`, as of this answer. None: unknown."""
    device_errors: Count = 0
    """Workers in a row that died of a device error in a step that computed for this session. The count
    restarts at 1 if two errors are far apart, in time or in chunks."""
    device_error_at: UnixSeconds | None = None
    """When the last of these workers died."""
    device_error_chunk: Count = 0
    """`next_chunk` when the last of these workers died."""
    reason: Note | None = None
    """Why the session ended, or why it waits."""
    created_at: UnixSeconds
    updated_at: UnixSeconds
    traceparent: Traceparent | None = None
    """Trace context of the newest creation, resumption or change of owner. None: it was not traced."""
    prompt_traceparent: Traceparent | None = None
    """Trace context of the request that set the newest prompt or control after the first prompt. None: it was
    not traced."""
    migration_traceparent: Traceparent | None = None
    """Trace context of the request that began the current migration. None: none, or it was not traced."""

    @property
    def slot_cost(self) -> int:
        """What a slot costs the session's tenant in the order of those that wait: a session of twice the
        weight costs half. A whole number, so that sums are exact."""
        return round(SLOT_COST / self.weight)


class PromptReceipt(Contract):
    """Confirms that a prompt is accepted. The event `prompt.applied` or `prompt.superseded` follows."""

    session: Id
    prompt_id: Id
    control_seq: Count
    prompt: Text
    accepted_at: UnixSeconds
    rates: tuple[RateLeft, ...] = Field(default=(), max_length=8)
    """What the prompt has left of the limits per time. A repeat has none."""


class ControlReceipt(Contract):
    """Confirms that a control's value is accepted. The event `control.applied` or `control.superseded`
    follows."""

    session: Id
    control_id: Id
    control_seq: Count
    name: ControlName
    value: ControlValue = None
    accepted_at: UnixSeconds
    rates: tuple[RateLeft, ...] = Field(default=(), max_length=8)
    """As in `PromptReceipt`."""


class Decision(Contract):
    """One decision of the scheduler about a session, with its reason and its numbers."""

    session: Id
    epoch: Count
    worker: Id | None = None
    kind: Text = Field(max_length=64)
    """What was decided. One of:

    - place, resume, recover, wait
    - rebuild: the session's worker is draining, and no other worker can take the state.
    - migrate, migrated, stay: a migration begins, is committed, is abandoned.
    - release: no worker owns the suspended session now, because its worker has no state of it or cannot
      transfer it.
    - device_error: the session's worker died of a device error in a step that computed for the session.
    """
    reason: Note
    numbers: Numbers = {}
    at: UnixSeconds = 0.0
