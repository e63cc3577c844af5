"""The rules of a worker's row, and of the room on workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turboserve.allocation.slots import slots_used
from turboserve.contracts import events
from turboserve.contracts.errors import (
    ConflictError,
    InvalidInputError,
    NoCapacityError,
    UnknownModelError,
    WorkerGoneError,
)
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord
from turboserve.control_values import check_declarations
from turboserve.served_classes import served_class, served_classes
from turboserve.state_store.core.change import event_id
from turboserve.state_store.core.receipts import refused_as_input
from turboserve.wording import counted

TICK_S = 0.001
"""Minimum time between a renewal and the one before it, seconds."""


@dataclass(frozen=True)
class Slots:
    """One worker's capacity and its used slots, at one moment, with its row locked.

    Sessions that run there and sessions that migrate there use slots.
    """

    model: str
    phase: WorkerPhase
    capacity: int
    used: int
    weights_digest: str | None = None

    @classmethod
    def of_class(cls, record: WorkerRecord, model: str, counts: Mapping[str, int]) -> Slots:
        """Return the slots of a worker that serves several classes, for a session of `model`.

        `counts`: sessions that use slots, by class. A class that the worker does not serve gets those of the
        first one, which `check_model` refuses.
        """
        one = served_class(record, model) or served_classes(record)[0]
        served = {each.model: each.capacity for each in served_classes(record)}
        used = slots_used(served, one.model, counts)
        return cls(one.model, record.phase, one.capacity, used, one.weights_digest)

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.used)

    def check(self, worker: str) -> None:
        """Raise WorkerGoneError or NoCapacityError if no session may be placed on the worker."""
        if self.phase is WorkerPhase.GONE:
            raise gone(worker)
        if self.phase is not WorkerPhase.READY:
            raise NoCapacityError(
                f"worker {worker} is {self.phase.value} and takes no more sessions",
                field="worker",
                limit=self.phase.value,
                retry_after_s=1.0,
            )

    def check_model(self, worker: str, model: str) -> None:
        """Raise InvalidInputError if the worker serves another model."""
        if self.model != model:
            raise InvalidInputError(
                f"worker {worker} serves {self.model}, not {model}", field="worker", limit=self.model
            )

    def check_weights(self, worker: str, weights_digest: str | None) -> None:
        """Raise InvalidInputError if the worker is known to have other weights."""
        if None not in (self.weights_digest, weights_digest) and self.weights_digest != weights_digest:
            raise InvalidInputError(
                f"worker {worker} has the weights {self.weights_digest}, "
                f"and the session's state was made with {weights_digest}",
                field="weights_digest",
                limit=self.weights_digest,
            )

    def check_room(self, worker: str, retry_s: float) -> None:
        """Raise NoCapacityError if no slot is free."""
        if self.free < 1:
            raise NoCapacityError(
                f"worker {worker} is full: it holds {counted(self.used, 'session')}",
                field="worker",
                limit=self.capacity,
                retry_after_s=retry_s,
            )


@dataclass(frozen=True)
class ModelCapacity:
    """The capacity of a model's live workers, and the number of sessions that hold or wait for a slot."""

    model: str
    known: bool
    """Whether a pool is for the model, or a worker serves it or did so a short time ago."""
    capacity: int
    demand: int
    """Sessions of this model that run, wait for their first worker, or wait to be resumed."""

    def admit(self, retry_s: float) -> None:
        """Raise UnknownModelError or NoCapacityError if another session does not fit."""
        if not self.known:
            raise UnknownModelError(f"no worker serves the model {self.model}", field="model")
        if self.demand >= self.capacity:
            raise NoCapacityError(
                f"no slot for {self.model} is free ({self.capacity} in all)"
                if self.capacity
                else f"no worker for {self.model} is ready yet",
                field="model",
                limit=self.capacity,
                retry_after_s=retry_s,
            )


def phase_after(current: WorkerPhase, reported: WorkerPhase) -> WorkerPhase:
    """Return the phase after a renewal, which does not undo a drain of which the worker does not know yet."""
    return WorkerPhase.DRAINING if current is WorkerPhase.DRAINING else reported


def of_earlier_incarnation(record: WorkerRecord | None, load: LoadReport) -> bool:
    """Return whether the report is of a process that another process with the same id has replaced."""
    return record is not None and 0 < load.started_at < record.started_at


def renewed(record: WorkerRecord | None, load: LoadReport, now: float) -> WorkerRecord:
    """Return the row after a renewal.

    A process that was restarted under its old id, before that id was declared gone, takes over the row with
    its first report, and starts. Raises WorkerGoneError to a worker that was declared gone, reports itself
    gone, or was replaced, and InvalidInputError for controls that are not declared as they have to be.
    """
    if load.phase is WorkerPhase.GONE or (record is not None and record.phase is WorkerPhase.GONE):
        raise gone(load.worker)
    if of_earlier_incarnation(record, load):
        raise WorkerGoneError(f"worker {load.worker} has been restarted since", field="worker")
    if record is None or record.controls != load.controls:
        with refused_as_input():
            check_declarations(load.controls)
    known = {} if record is None else {one.model: one.controls for one in record.classes or ()}
    for one in load.classes or ():
        if known.get(one.model) != one.controls:
            with refused_as_input():
                check_declarations(one.controls)
    if record is not None:
        # Readers recognize a renewal by its increased time, also after the wall clock was set back.
        now = max(now, record.renewed_at + TICK_S)
    again = record is not None and load.started_at > record.started_at
    if record is not None and load.phase is WorkerPhase.STARTING is not record.phase and not again:
        # The worker sent this report before it was ready, and it was processed afterwards.
        return record.model_copy(update={"renewed_at": now})
    return WorkerRecord(
        id=load.worker,
        model=load.model,
        # A drain applied to the former process, which is gone with its sessions.
        phase=load.phase if record is None or again else phase_after(record.phase, load.phase),
        capacity=load.capacity,
        weights_digest=load.weights_digest,
        controls=load.controls,
        frame=load.frame,
        classes=load.classes,
        device=load.device,
        pid=load.pid,
        pool_member=load.pool_member,
        chunk_latency_s=load.chunk_latency_s,
        floor_capacity=load.floor_capacity,
        transfer=load.transfer,
        host=load.host,
        started_at=load.started_at or (now if record is None else record.started_at),
        renewed_at=now,
        reason=None if record is None else record.reason,
    )


def left(record: WorkerRecord, reason: str) -> WorkerRecord | None:
    """Return the row of a worker declared gone; None if it is gone already."""
    if record.phase is WorkerPhase.GONE:
        return None
    return record.model_copy(
        update={
            "phase": WorkerPhase.GONE,
            "reason": reason.replace("\x00", ""),
            "sessions": 0,
            "suspended": 0,
        }
    )


def draining(record: WorkerRecord) -> WorkerRecord | None:
    """Return the row of a worker that takes no more sessions; None if it drains already."""
    if record.phase is WorkerPhase.GONE:
        raise gone(record.id)
    if record.phase is WorkerPhase.DRAINING:
        return None
    return record.model_copy(update={"phase": WorkerPhase.DRAINING})


def joined_event(record: WorkerRecord, now: float) -> events.WorkerJoined:
    return events.WorkerJoined(id=event_id(record.id, "joined"), at=now, worker=record)


def left_event(record: WorkerRecord, now: float) -> events.WorkerLeft:
    return events.WorkerLeft(id=event_id(record.id, "left"), at=now, worker=record)


def gone(worker: str) -> WorkerGoneError:
    return WorkerGoneError(f"worker {worker} was declared gone; start again under a new id", field="worker")


class Leases:
    """What one instance knows of workers' leases beyond their rows: whether a lease may still hold.

    A worker continues while the state store confirms its lease. It also continues while no state store
    answers or the database is away, since no other worker can take its sessions then. So a worker may be
    declared gone for its silence only if the silence is certain. Rows do not show:

    - a renewal that could not be written;
    - a renewal that a crash of Postgres took back;
    - a time without any state store that could answer renewals.

    `now` is monotonic seconds.

    Renewals with another instance appear only in the row. While an instance answers, no worker finds that
    none is there.
    """

    def __init__(self, lease_s: float, worker_timeout_s: float, now: float) -> None:
        self._limit_s = (lease_s + worker_timeout_s) / 2
        """A lease plus half of the margin, since clocks differ and the current chunk takes some time."""
        self._renewed: dict[str, float] = {}
        """Worker → time of its last request to renew, whatever the answer was."""
        self._connection: int | None = None
        self._since = now
        """Time since which workers have reached this process."""

    def connected(self, connection: int | None, now: float) -> None:
        """Note the number of the connection over which workers reach this process; None while there is none.

        Call this before `renewed` and `check_silent`: messages may have been lost on the former connection.
        """
        if connection is None or connection != self._connection:
            self._connection, self._since = connection, now

    def renewed(self, worker: str, now: float) -> None:
        """Note a request to renew. Call this when it arrives: the lease counts from when it was sent."""
        self._renewed[worker] = now

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone."""
        self._renewed.pop(worker, None)

    def check_silent(self, record: WorkerRecord, renewed_at: float, now: float) -> None:
        """Raise ConflictError unless the worker is certainly silent. The caller holds the lock of its row.

        `renewed_at` is what the scheduler that declares it gone has read. A renewal that comes later finds
        that the worker is gone.
        """
        self._renewed = {name: at for name, at in self._renewed.items() if now - at < self._limit_s}
        heard_at = max(self._since, self._renewed.get(record.id, self._since))
        if record.renewed_at > renewed_at:
            raise ConflictError(f"worker {record.id} has renewed since its row was read", field="renewed_at")
        if now - heard_at < self._limit_s:
            raise ConflictError(
                f"worker {record.id} may have renewed its lease {now - heard_at:.1f} s ago, "
                f"limit {self._limit_s:g} s",
                field="worker",
                limit=self._limit_s,
                retry_after_s=self._limit_s - (now - heard_at),
            )
