"""What may happen to a worker's row, and what room there is."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts import events
from turboserve.contracts.errors import (
    InvalidInputError,
    NoCapacityError,
    UnknownModelError,
    WorkerGoneError,
)
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord
from turboserve.state_store.core.change import event_id


@dataclass(frozen=True)
class Slots:
    """One worker's capacity and what of it is taken, at one moment, with its row locked.

    Taken are the slots of the sessions that run there and of those that are moving there.
    """

    model: str
    phase: WorkerPhase
    capacity: int
    used: int
    weights_digest: str | None = None

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.used)

    def check(self, worker: str) -> None:
        """Raises WorkerGoneError or NoCapacityError if nothing may be placed on it."""
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
        """Raises InvalidInputError if it serves another model."""
        if self.model != model:
            raise InvalidInputError(
                f"worker {worker} serves {self.model}, not {model}", field="worker", limit=self.model
            )

    def check_weights(self, worker: str, weights_digest: str | None) -> None:
        """Raises InvalidInputError if it is known to have other weights than those."""
        if None not in (self.weights_digest, weights_digest) and self.weights_digest != weights_digest:
            raise InvalidInputError(
                f"worker {worker} has the weights {self.weights_digest}, "
                f"and the session's state was made with {weights_digest}",
                field="weights_digest",
                limit=self.weights_digest,
            )

    def check_room(self, worker: str, retry_s: float) -> None:
        """Raises NoCapacityError if no slot is free."""
        if self.free < 1:
            raise NoCapacityError(
                f"worker {worker} holds {self.used} of {self.capacity} sessions",
                field="worker",
                limit=self.capacity,
                retry_after_s=retry_s,
            )


@dataclass(frozen=True)
class ModelCapacity:
    """What a model's live workers hold at once, and how many sessions hold or wait for a slot."""

    model: str
    known: bool
    """Whether a worker serves it, or did a short while ago."""
    capacity: int
    demand: int
    """Sessions of this model that run, wait for their first worker, or wait to be resumed."""

    def admit(self, retry_s: float) -> None:
        """Raises UnknownModelError or NoCapacityError if one more does not fit."""
        if not self.known:
            raise UnknownModelError(f"no worker serves the model {self.model}", field="model")
        if self.demand >= self.capacity:
            raise NoCapacityError(
                f"all {self.capacity} places for {self.model} are taken"
                if self.capacity
                else f"no worker for {self.model} is ready yet",
                field="model",
                limit=self.capacity,
                retry_after_s=retry_s,
            )


def phase_after(current: WorkerPhase, reported: WorkerPhase) -> WorkerPhase:
    """A drain is for good: a worker that does not know of it yet does not undo it."""
    return WorkerPhase.DRAINING if current is WorkerPhase.DRAINING else reported


def of_earlier_incarnation(record: WorkerRecord | None, load: LoadReport) -> bool:
    """Whether a process says this whose place another one has taken, under the same id."""
    return record is not None and 0 < load.started_at < record.started_at


TICK_S = 0.001
"""A renewal is at least so much later than the one before."""


def renewed(record: WorkerRecord | None, load: LoadReport, now: float) -> WorkerRecord:
    """The row after a renewal. A process that was started again under its old id, before that was declared
    gone, takes the row over with its first word, and starts.

    Raises WorkerGoneError to one that was declared gone, or says that it is, or has been replaced.
    """
    if load.phase is WorkerPhase.GONE or (record is not None and record.phase is WorkerPhase.GONE):
        raise gone(load.worker)
    if of_earlier_incarnation(record, load):
        raise WorkerGoneError(f"worker {load.worker} has been started again since", field="worker")
    if record is not None:
        # Others tell a renewal by its time having risen, also after the wall clock was set back.
        now = max(now, record.renewed_at + TICK_S)
    again = record is not None and load.started_at > record.started_at
    if record is not None and load.phase is WorkerPhase.STARTING is not record.phase and not again:
        # Said before it was ready, and carried out after.
        return record.model_copy(update={"renewed_at": now})
    return WorkerRecord(
        id=load.worker,
        model=load.model,
        # The drain was the process's before this one: that has gone, and with it what it held.
        phase=load.phase if record is None or again else phase_after(record.phase, load.phase),
        capacity=load.capacity,
        weights_digest=load.weights_digest,
        device=load.device,
        pid=load.pid,
        pool_slot=load.pool_slot,
        chunk_latency_s=load.chunk_latency_s,
        transfer=load.transfer,
        host=load.host,
        started_at=load.started_at or (now if record is None else record.started_at),
        renewed_at=now,
        reason=None if record is None else record.reason,
    )


def left(record: WorkerRecord, reason: str) -> WorkerRecord | None:
    """The row of a worker declared gone; None: it is already."""
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
    """The row of a worker that takes nothing more; None: it drains already."""
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
