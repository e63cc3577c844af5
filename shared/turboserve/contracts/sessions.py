"""Sessions: their row, the phases it goes through, and the controls that people apply to them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from turboserve.contracts.base import Contract, Count, Id, Note, Text, UnixSeconds

PROMPT_LIMIT = 2_000
"""Characters in a prompt, at most."""
METADATA_KEYS_LIMIT = 16
METADATA_VALUE_LIMIT = 512
SEED_LIMIT = 2**63 - 1

Prompt = Annotated[Text, Field(min_length=1, max_length=PROMPT_LIMIT)]
Digest = Annotated[Text, Field(max_length=128)]
"""Of a session's state."""
WeightsDigest = Annotated[Text, Field(max_length=64)]
"""Of a worker's model as it computes: configuration and weights of all networks. A session's state goes on
only where this is equal."""
Numbers = Annotated[dict[Annotated[Text, Field(max_length=64)], float], Field(max_length=64)]
"""The figures behind a decision, by name."""


class Phase(StrEnum):
    """Where a session is in its life (the design, "A session's life")."""

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
        return self in (Phase.ACTIVE, Phase.MIGRATING)


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.REQUESTED: frozenset({Phase.ACTIVE, Phase.SUSPENDED, Phase.TERMINATED, Phase.FAILED}),
    Phase.ACTIVE: frozenset({Phase.ACTIVE, Phase.MIGRATING, Phase.SUSPENDED, Phase.TERMINATED, Phase.FAILED}),
    Phase.MIGRATING: frozenset({Phase.ACTIVE, Phase.SUSPENDED, Phase.TERMINATED, Phase.FAILED}),
    Phase.SUSPENDED: frozenset({Phase.SUSPENDED, Phase.ACTIVE, Phase.TERMINATED, Phase.FAILED}),
    Phase.TERMINATED: frozenset(),
    Phase.FAILED: frozenset(),
}
"""Every transition that the state store allows. ACTIVE → ACTIVE is a change of owner."""


class Activity(StrEnum):
    """What the user wants of the session, whatever its phase is at the moment."""

    WATCHING = "watching"
    PAUSED = "paused"
    IDLE = "idle"
    """Nobody has watched for `idle_after`."""


class SessionRecord(Contract):
    """One session's row: the truth about who runs it and from where."""

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
    """Raised by every change; the compare-and-set is on it."""
    epoch: Count
    """The number of the current ownership; 0 before the first."""
    worker: Id | None = None
    """Who owns it; for a suspended session, who holds its state in host memory."""
    target: Id | None = None
    """The worker it is being moved to: only while `migrating`, or `suspended` with its holder changing.
    Worker and epoch stay the source's until the move is committed."""
    move: Count | None = None
    """Number of the move under way: the version of the row with which it began, so unique per session."""
    own_revision: Count | None = None
    """Stream sequence of the newest `own.<session>`: what the fence compares with."""
    next_chunk: Count = 0
    """Index of the first chunk that has not been accepted into the log, as far as the store has read it."""
    control_seq: Count = 0
    """Number of the newest accepted control; the prompt above is its result."""
    applied_control_seq: Count = 0
    """Number of the newest control that an accepted chunk was made under."""
    state_digest: Digest | None = None
    weights_digest: WeightsDigest | None = None
    """Of the worker that owns the session, or that owned it last; None: no worker has owned it yet, or that
    worker did not say."""
    playhead_s: float = 0.0
    """Media time that playback had reached when last reported, seconds."""
    unwatched_s: float | None = None
    """For how long nobody has watched or changed it, as of this answer of the store; None: not known."""
    device_errors: Count = 0
    """Workers in a row that died of a device error in a step that computed for it; 0 again after it has made
    chunks on another."""
    device_error_at: UnixSeconds | None = None
    """When the last of them said so."""
    device_error_chunk: Count = 0
    """`next_chunk` then."""
    reason: Note | None = None
    """Why it ended, or why it waits."""
    created_at: UnixSeconds
    updated_at: UnixSeconds


class PromptReceipt(Contract):
    """The first phase of a receipt: the prompt is accepted. `prompt.applied` follows with the chunk index."""

    session: Id
    event_id: Id
    control_seq: Count
    prompt: Text
    accepted_at: UnixSeconds


class Decision(Contract):
    """One decision of the scheduler with its reason and its numbers."""

    session: Id
    epoch: Count
    worker: Id | None = None
    kind: Text = Field(max_length=64)
    """place, resume, recover, wait; rebuild (its worker is to be emptied, and its state can go nowhere);
    migrate (a move begins), moved (it is done), stay (it was given up); release (a suspended session, of
    which its worker has no state or gives none away: no worker owns it now); device_error (its worker died of
    one in a step for it)."""
    reason: Note
    numbers: Numbers = {}
    at: UnixSeconds = 0.0
