"""Workers: their reports, renewals and assignments."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, SecretStr

from turboserve.contracts.base import Contract, Count, Id, Note, Secret, Text, UnixSeconds
from turboserve.contracts.controls import ControlDeclarations
from turboserve.contracts.decoding import DecodeCapacity
from turboserve.contracts.fidelity import ChunkFidelity, Quality, SessionSlack
from turboserve.contracts.loans import WorkerLoan
from turboserve.contracts.sessions import Digest, SessionRecord, WeightsDigest
from turboserve.contracts.worker_offers import (
    SLOTS_LIMIT,
    FrameSize,
    LatencyProfile,
    ServedClasses,
    Slots,
    WorkerPrice,
)

MEDIA_LIMIT_S = 1e9
"""Maximum media time, seconds: 31 years."""
DELIVERED_LIMIT = 10**12
"""Maximum number of bytes sent to viewers that one message reports: far above what a gateway sends."""

Addresses = Annotated[tuple[Annotated[Text, Field(max_length=512)], ...], Field(max_length=16)]
"""Addresses at which a worker serves the state of sessions."""


class WorkerPhase(StrEnum):
    """A worker's phase from the pool's view. A worker that is gone never returns with the same id."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


class HeldSession(Contract):
    """A session, as reported by the worker that holds it."""

    session: Id
    epoch: Count
    next_chunk: Count
    resident: bool = True
    """Whether the state is in a slab. False: it is suspended to host memory."""
    lead_s: float = 0.0
    """Seconds of media generated ahead of the playhead."""
    control_seq: Count = 0
    slack: SessionSlack | None = None
    """None: the session does not run, or an earlier version reports."""
    fidelity: ChunkFidelity | None = None
    """Configuration of the newest chunk. None: the best."""


class SessionRefusal(Contract):
    """A worker refuses to run a session that was assigned to it."""

    session: Id
    epoch: Count
    reason: Note


class MigrationStage(StrEnum):
    """The progress of a migration, from the target's view."""

    COPYING = "copying"
    VERIFIED = "verified"
    """The target has the state, and its digest equals the source's: the migration may be committed."""
    FAILED = "failed"


NO_STATE = "no_state"
"""Error code: the source has no state of the session, so there is nothing to copy, now or later."""


class MigrationReport(Contract):
    """The target's report about a migration. Part of every load report; sent at once on a change."""

    session: Id
    migration: Count
    stage: MigrationStage
    next_chunk: Count = 0
    """Index of the chunk that the migrated state generates next."""
    digest: Digest | None = None
    bytes_copied: Count = 0
    """Number of bytes copied in all rounds."""
    state_bytes: Count = 0
    """Size of the state, bytes. `bytes_copied` is larger if parts of the state changed during the copy."""
    seconds: float = Field(default=0.0, ge=0)
    """Duration of the copy, seconds."""
    limit_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Time limit of the copy, seconds from its start. 0: the copy has not started."""
    reason: Note | None = None
    """Why the migration failed."""
    code: Text | None = Field(default=None, max_length=64)
    """Code of the error with which the migration failed, for example `NO_STATE`."""


class LoadReport(Contract):
    """worker → scheduler, autoscaler, every `heartbeat_s` and at once on a change: the worker's load."""

    worker: Id
    model: Id
    capacity: Slots
    """K, the number of sessions that fit at once, from the byte budget and the configured limit."""
    weights_digest: WeightsDigest | None = None
    """None: not known yet, as while the worker loads its model."""
    controls: ControlDeclarations = ()
    """Controls that the model takes beside a prompt. Only a report in a renewal has them, for the worker's
    row. Empty there: none, or an earlier version reports."""
    frame: FrameSize | None = None
    """Size of the frames that the worker generates. Only a report in a renewal has it, as `controls`."""
    classes: ServedClasses = None
    """The classes of a worker that serves several, the first of which is `model` with its `capacity`,
    `weights_digest` and `chunk_latency_s`. None: the worker serves `model` alone."""
    phase: WorkerPhase = WorkerPhase.READY
    sessions: tuple[HeldSession, ...] = ()
    refusals: tuple[SessionRefusal, ...] = ()
    """Sessions that the worker refuses. Repeated in every report until the row names another owner."""
    migrations: tuple[MigrationReport, ...] = ()
    """Migrations to this worker."""
    transfer: Addresses = ()
    """Addresses at which other workers request state, e.g. `tcp://127.0.0.1:4711?backend=gloo`."""
    host: Text = Field(default="", max_length=255)
    """The worker's machine, to distinguish near workers from far ones. Empty: not known."""
    chunk_latency_s: LatencyProfile = {}
    """Measured latency of a chunk, seconds, by the number of sessions in the batch: the profile L(b)."""
    floor_chunk_latency_s: LatencyProfile = {}
    """As `chunk_latency_s`, at the fastest configuration above the floor. Empty: it lowers no quality."""
    floor_capacity: Slots | None = None
    """K_floor: number of sessions that fit while it absorbs a burst at its floor. None: `capacity`."""
    decoding: DecodeCapacity | None = None
    """The decode workers that may limit `capacity`. None: they are not known yet, or the worker decodes."""
    quality: Quality | None = None
    """Mean quality of the chunks of the last minute. None: no chunk, or not measured."""
    quality_debt: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the chunks of the last minute that were below the best configuration because of the worker's
    load. Chunks whose configuration a client has set do not count."""
    deficit: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Expected number of late chunks within the worker's horizon."""
    loan: WorkerLoan | None = None
    """The loan under way. None: the worker neither borrows nor lends."""
    host_states: Count | None = None
    """Number of suspended sessions that fit into the worker's host memory, by the largest state. 0: paused
    sessions may keep their slabs, and no suspended session can migrate to this worker. None: not known."""
    host_sessions: Slots = 0
    """Number of active sessions that host memory holds beyond the slabs. 0: each has a slab."""
    offloaded: Slots = 0
    """Number of active sessions whose state is in host memory now, or that wait for a first slab."""
    device: Text = Field(default="cpu", max_length=64)
    pid: Count | None = None
    pool_member: Text | None = Field(default=None, max_length=64)
    """Name of the pool member in which the worker runs. None: no pool started the worker."""
    started_at: UnixSeconds = 0.0
    release: Text | None = Field(default=None, max_length=64)
    """Release of the worker's software. None: not known, as from a worker of schema version 1.0."""
    device_error_sessions: Annotated[tuple[Id, ...], Field(max_length=SLOTS_LIMIT)] = ()
    """With phase `gone` after a device error: the sessions that the failing step computed for."""


class Incoming(Contract):
    """A session that migrates to this worker by its row, and the addresses of the source."""

    record: SessionRecord
    source: Addresses = ()
    """The source's `transfer` addresses. Empty: the source has none, or is gone."""


def _hexadecimal(key: SecretStr) -> SecretStr:
    if re.fullmatch(r"[0-9a-f]{64}", key.get_secret_value()) is None:
        raise ValueError("not 32 bytes in hexadecimal")
    return key


TransferSecret = Annotated[Secret, AfterValidator(_hexadecimal)]
"""32 random bytes, in hexadecimal."""


class MigrationKey(Contract):
    """The secret of one migration, by which its two workers authenticate each other and their messages.

    state store → the source and the target, together with their rows. No row, event, log or answer of the
    REST API contains the key. The key exists as long as the migration.
    """

    session: Id
    migration: int
    key: TransferSecret

    # A refused key must not be shown either.
    model_config = ConfigDict(hide_input_in_errors=True)


class Renewal(Contract):
    """state store → worker: all sessions whose rows name this worker. The worker releases all other sessions.

    Suspended sessions that the worker did not report are left out, and so is users' metadata. A row without
    `own_revision` is of a session that the worker holds already and whose new epoch is not in the log yet.
    The worker keeps the state of such a session, and appends nothing until a later answer has the revision.
    """

    worker: Id
    assigned: tuple[SessionRecord, ...] = ()
    incoming: tuple[Incoming, ...] = ()
    """All sessions that migrate to this worker. The worker releases the copies of other migrations, unless
    `assigned` names the session: then the migration is committed."""
    keys: tuple[MigrationKey, ...] = ()
    """Keys of all migrations to or from this worker."""
    drain: bool = False


class WorkerRecord(Contract):
    """One worker's row."""

    id: Id
    model: Id
    phase: WorkerPhase
    capacity: Slots
    sessions: Count = 0
    """Number of sessions that hold a slot."""
    suspended: Count = 0
    incoming: Count = 0
    """Number of sessions that migrate to this worker and have a slot reserved, in addition to `sessions`."""
    weights_digest: WeightsDigest | None = None
    """None: not known yet, as while the worker loads its model."""
    controls: ControlDeclarations = ()
    """See `LoadReport.controls`."""
    frame: FrameSize | None = None
    """See `LoadReport.frame`."""
    classes: ServedClasses = None
    """See `LoadReport.classes`."""
    transfer: Addresses = ()
    """Addresses at which other workers request state."""
    host: Text = Field(default="", max_length=255)
    device: Text = Field(default="cpu", max_length=64)
    pid: Count | None = None
    pool_member: Text | None = Field(default=None, max_length=64)
    chunk_latency_s: LatencyProfile = {}
    floor_capacity: Slots | None = None
    """K_floor. None: the worker lowers no quality, and takes at most `capacity` sessions."""
    started_at: UnixSeconds
    renewed_at: UnixSeconds
    reason: Note | None = None
    price: WorkerPrice | None = None
    """Only in a listing. None: no price is set for the worker's kind."""

    @property
    def most_sessions(self) -> int:
        """Sessions that the worker can hold at all, some at lower fidelity."""
        return max(self.capacity, self.floor_capacity or 0)

    @property
    def device_kind(self) -> str:
        """The device without its number: the kind of a worker that has no kind of its own."""
        return self.device.partition(":")[0]


class Assignment(Contract):
    """state store → worker, at once after every commit to a row that names or named the worker.

    A hint that saves waiting for the next renewal. A lost hint only costs that wait.
    """

    record: SessionRecord
    incoming: Incoming | None = None
    """Only for the target of a migration: the same as in `Renewal.incoming`."""
    key: MigrationKey | None = None
    """For both workers of a migration."""


class Playhead(Contract):
    """gateway → worker, state store, scheduler, several times a second: a session's viewers at this gateway.

    The newest report of each gateway counts. `turboserve.audience` combines the reports of several gateways.
    """

    session: Id
    gateway: Id | None = None
    """The reporting gateway process. None: a process of an earlier version."""
    playhead_s: float = Field(ge=0, le=MEDIA_LIMIT_S)
    """Playhead of the viewer at this gateway who is furthest ahead, seconds."""
    age_s: float = Field(default=0.0, ge=0)
    """Time for which that viewer has played on since it was observed at `playhead_s`, by the gateway's
    monotonic clock, seconds. 0: it does not play, or was observed just now."""
    viewers: Count
    """Number of viewers at this gateway. 0, sent once: the last viewer has left."""
    viewer_s: float = Field(default=0.0, ge=0, le=MEDIA_LIMIT_S)
    """Time of all viewers at this gateway since its previous message about the session, seconds."""
    delivered_bytes: int = Field(default=0, ge=0, le=DELIVERED_LIMIT)
    """Video that this gateway has sent to viewers since its previous message about the session."""
    live: bool = True
    """Whether a viewer has reported its playhead lately. If False, `playhead_s` is an old playhead, and
    reports of other gateways take precedence."""
    at: UnixSeconds = 0.0
