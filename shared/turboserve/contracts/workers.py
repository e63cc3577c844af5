"""Workers: what they report, how they renew, what they are told."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, SecretStr

from turboserve.contracts.base import Contract, Count, Id, Note, Secret, Text, UnixSeconds
from turboserve.contracts.sessions import Digest, SessionRecord, WeightsDigest

SLOTS_LIMIT = 10_000
"""Sessions of one worker, at most."""
MEDIA_LIMIT_S = 1e9
"""Media time, at most: 31 years."""

Slots = Annotated[int, Field(ge=0, le=SLOTS_LIMIT)]
LatencyProfile = Annotated[
    dict[Annotated[int, Field(ge=1, le=SLOTS_LIMIT)], Annotated[float, Field(ge=0, le=86_400)]],
    Field(max_length=256),
]
"""Seconds of a chunk by the number of sessions in the batch, L(b)."""
Addresses = Annotated[tuple[Annotated[Text, Field(max_length=512)], ...], Field(max_length=16)]
"""Where a worker is asked for the state of sessions."""


class WorkerPhase(StrEnum):
    """A worker's life as the pool sees it. A worker that is gone never comes back under the same id."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class HeldSession(Contract):
    """A session as the worker that holds it sees it."""

    session: Id
    epoch: Count
    next_chunk: Count
    resident: bool = True
    """In a slab (True), or suspended to host memory (False)."""
    lead_s: float = 0.0
    """Media generated ahead of the playhead, seconds."""
    control_seq: Count = 0


class SessionRefusal(Contract):
    """A worker will not run a session it was given."""

    session: Id
    epoch: Count
    reason: Note


class MoveStage(StrEnum):
    """How far a move is, as its target sees it."""

    COPYING = "copying"
    VERIFIED = "verified"
    """The state is here and its digest is the source's: the move may be committed."""
    FAILED = "failed"


NO_STATE = "no_state"
"""The source has no state of the session: there is nothing to copy, now or later."""


class MoveReport(Contract):
    """What the target of a move says of it: in every report while its row says so, at once on a change."""

    session: Id
    move: Count
    stage: MoveStage
    next_chunk: Count = 0
    """Chunk that the moved state makes next."""
    digest: Digest | None = None
    bytes_moved: Count = 0
    """Over all rounds."""
    state_bytes: Count = 0
    """What the state takes: less than what was moved where parts of it changed on the way."""
    seconds: float = Field(default=0.0, ge=0)
    """Since the copy began."""
    limit_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """So long after the copy has begun it is given up, if it is not here by then; 0: it has not begun."""
    reason: Note | None = None
    """Why it failed."""
    code: Text | None = Field(default=None, max_length=64)
    """Code of the error that it failed with, for example `NO_STATE`."""


class LoadReport(Contract):
    """worker → scheduler, autoscaler, every `heartbeat_s` and at once on a change: what it runs."""

    worker: Id
    model: Id
    capacity: Slots
    """Sessions that fit at once: K, from the byte budget and the configured limit."""
    weights_digest: WeightsDigest | None = None
    """None: not known yet, as while it loads."""
    phase: WorkerPhase = WorkerPhase.READY
    sessions: tuple[HeldSession, ...] = ()
    refusals: tuple[SessionRefusal, ...] = ()
    """Repeated in every report until the row names another owner."""
    moves: tuple[MoveReport, ...] = ()
    """Sessions that are moving here."""
    transfer: Addresses = ()
    """Where other workers ask for the state of sessions, e.g. `tcp://127.0.0.1:4711?backend=gloo`."""
    host: Text = Field(default="", max_length=255)
    """The machine it runs on, to tell near from far; empty: not known."""
    chunk_latency_s: LatencyProfile = {}
    """Measured latency of a chunk, seconds, by the number of sessions in the batch: the profile L(b)."""
    host_states: Count | None = None
    """Suspended sessions that its host memory holds at once, however large each is; 0: those that pause may
    keep their slabs, and none can move here suspended; none: not known."""
    device: Text = Field(default="cpu", max_length=64)
    pid: Count | None = None
    pool_slot: Text | None = Field(default=None, max_length=64)
    """The pool's name for the place it runs in; None for a worker nobody's pool started."""
    started_at: UnixSeconds = 0.0
    device_error_sessions: Annotated[tuple[Id, ...], Field(max_length=SLOTS_LIMIT)] = ()
    """With phase `gone`: sessions that its last step computed for, of which its device failed."""


class Incoming(Contract):
    """A session whose row names this worker as the target of a move, and where its state is to be had."""

    record: SessionRecord
    source: Addresses = ()
    """The source's `transfer` addresses; empty: it has none, or is gone."""


def _hexadecimal(key: SecretStr) -> SecretStr:
    if re.fullmatch(r"[0-9a-f]{64}", key.get_secret_value()) is None:
        raise ValueError("not 32 bytes in hexadecimal")
    return key


class MigrationKey(Contract):
    """The secret of one migration, by which its two workers recognize each other and protect what they say.

    state store → the source and the target, beside their rows. No row, event, log or answer of the REST API
    has it. It lives as long as the migration.
    """

    session: Id
    move: int
    key: Annotated[Secret, AfterValidator(_hexadecimal)]
    """32 random bytes, hexadecimal."""

    # A key that is refused is not shown either.
    model_config = ConfigDict(hide_input_in_errors=True)


class Renewal(Contract):
    """state store → worker: all sessions whose rows name this worker. What is held beyond it is let go.

    Without those that are suspended and of which it reported nothing, and without people's metadata.
    A row without `own_revision` is one that the worker holds already and whose new epoch is not in the log
    yet: its state is kept, and nothing is appended until a later answer has the revision.
    """

    worker: Id
    assigned: tuple[SessionRecord, ...] = ()
    incoming: tuple[Incoming, ...] = ()
    """All sessions that are moving here. What was copied for a move that is not among them is let go, unless
    `assigned` names the session: then the move is done."""
    keys: tuple[MigrationKey, ...] = ()
    """Of all sessions that are moving to or from this worker."""
    drain: bool = False


class WorkerRecord(Contract):
    """One worker's row."""

    id: Id
    model: Id
    phase: WorkerPhase
    capacity: Slots
    sessions: Count = 0
    """Sessions that hold a slot."""
    suspended: Count = 0
    incoming: Count = 0
    """Sessions that are moving here; each has a slot reserved, beside `sessions`."""
    weights_digest: WeightsDigest | None = None
    """None: not known yet, as while it loads."""
    transfer: Addresses = ()
    """Where other workers ask it for the state of sessions."""
    host: Text = Field(default="", max_length=255)
    device: Text = Field(default="cpu", max_length=64)
    pid: Count | None = None
    pool_slot: Text | None = Field(default=None, max_length=64)
    chunk_latency_s: LatencyProfile = {}
    started_at: UnixSeconds
    renewed_at: UnixSeconds
    reason: Note | None = None


class Assignment(Contract):
    """state store → worker, at once after every commit to a row that names or named it.

    A hint that saves waiting for the next renewal; losing it costs that wait and nothing else.
    """

    record: SessionRecord
    incoming: Incoming | None = None
    """For the target of a move: what `Renewal.incoming` says of this session."""
    key: MigrationKey | None = None
    """For both workers of a move."""


class Playhead(Contract):
    """gateway → worker, state store, scheduler: how a session is watched through it (several times a second).

    Of each gateway the newest counts, and what several say is taken together by `turboserve.audience`.
    """

    session: Id
    gateway: Id | None = None
    """Which process says so; None: it is older than this field."""
    playhead_s: float = Field(ge=0, le=MEDIA_LIMIT_S)
    """Of its viewer who is furthest."""
    viewers: Count
    """How many it has; 0, once: the last of them has left."""
    live: bool = True
    """Whether one of them has said lately where it is. Else all are silent, and `playhead_s` is where one
    last was: what another gateway says counts before that."""
    at: UnixSeconds = 0.0
