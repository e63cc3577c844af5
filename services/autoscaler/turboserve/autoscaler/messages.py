"""What the pool's core is told, and what it asks for: plain values that can be logged and replayed."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.workers import LoadReport, WorkerRecord

# Events


@dataclass(frozen=True)
class Tick:
    """Time passes."""


@dataclass(frozen=True)
class SizeWanted:
    """The pool shall have `size` workers, because of `reason`."""

    size: int
    reason: str


@dataclass(frozen=True)
class RunningWorker:
    """One worker of this pool that the provider says is there."""

    member: str
    worker: str
    pid: int | None = None


@dataclass(frozen=True)
class ProviderWorkersListed:
    """All workers of this pool that the provider knew some time after `ListProviderWorkers(ticket)`."""

    ticket: int
    provider_workers: tuple[RunningWorker, ...]


@dataclass(frozen=True)
class WorkersListed:
    """All workers that are not gone, as the store had them some time after `ListWorkers(ticket)`."""

    ticket: int
    workers: tuple[WorkerRecord, ...]


@dataclass(frozen=True)
class LoadReported:
    """A worker speaks for itself. May be lost."""

    report: LoadReport


@dataclass(frozen=True)
class Exited:
    """The provider says that this worker's process has ended; `status` in words."""

    worker: str
    status: str


@dataclass(frozen=True)
class Done:
    """Command `ticket` succeeded."""

    ticket: int
    pid: int | None = None


@dataclass(frozen=True)
class Failed:
    """Command `ticket` failed, or its outcome is unknown. `missing`: what it was about is not there."""

    ticket: int
    reason: str
    missing: bool = False


Event = Tick | SizeWanted | ProviderWorkersListed | WorkersListed | LoadReported | Exited | Done | Failed

# Commands; each is answered once: Done or Failed, or what it asked for.


@dataclass(frozen=True)
class Reserve:
    """provider: set aside what a worker needs."""

    ticket: int
    member: str


@dataclass(frozen=True)
class Launch:
    """provider: start a worker under this id in the reserved slot."""

    ticket: int
    member: str
    worker: str


@dataclass(frozen=True)
class Drain:
    """store and provider: nothing new for this worker."""

    ticket: int
    member: str
    worker: str


@dataclass(frozen=True)
class Release:
    """provider: end the worker, if one is there, and give the slot's resources back."""

    ticket: int
    member: str
    worker: str | None
    reason: str


@dataclass(frozen=True)
class DeclareGone:
    """store: this worker is no more."""

    ticket: int
    worker: str
    reason: str


@dataclass(frozen=True)
class ListProviderWorkers:
    """provider: what lives?"""

    ticket: int


@dataclass(frozen=True)
class ListWorkers:
    """store: which workers are there, and what do they hold?"""

    ticket: int


Command = Reserve | Launch | Drain | Release | DeclareGone | ListProviderWorkers | ListWorkers
