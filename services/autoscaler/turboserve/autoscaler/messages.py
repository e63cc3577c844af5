"""Events and commands of the pool's core: plain values that can be logged and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turboserve.autoscaler.control.pool_offers import Switch
from turboserve.contracts.workers import LoadReport, WorkerRecord

# Events


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class SizeWanted:
    """The wanted number of workers, and the reason."""

    size: int
    reason: str


@dataclass(frozen=True)
class SizesWanted:
    """The wanted number of workers of each offer, and the reason. For a pool with several offers."""

    sizes: Mapping[str, int]
    reason: str
    switches: tuple[Switch, ...] = ()
    """Changes of the sizes that are switches: a new worker starts when another one has ended."""


@dataclass(frozen=True)
class RunningWorker:
    """One worker of this pool in the provider's list."""

    member: str
    worker: str
    pid: int | None = None


@dataclass(frozen=True)
class ProviderWorkersListed:
    """All workers of this pool at the provider, read after `ListProviderWorkers(ticket)`."""

    ticket: int
    provider_workers: tuple[RunningWorker, ...]


@dataclass(frozen=True)
class WorkersListed:
    """All workers that are not gone, read from the store after `ListWorkers(ticket)`."""

    ticket: int
    workers: tuple[WorkerRecord, ...]


@dataclass(frozen=True)
class LoadReported:
    """A worker's load report. It may be lost."""

    report: LoadReport


@dataclass(frozen=True)
class Exited:
    """The provider's report that a worker's process has ended. `status` describes how."""

    worker: str
    status: str


@dataclass(frozen=True)
class Done:
    """Command `ticket` succeeded."""

    ticket: int
    pid: int | None = None


@dataclass(frozen=True)
class Failed:
    """Command `ticket` failed, or its outcome is unknown. `missing`: the command's object does not exist."""

    ticket: int
    reason: str
    missing: bool = False


Event = (
    Tick
    | SizeWanted
    | SizesWanted
    | ProviderWorkersListed
    | WorkersListed
    | LoadReported
    | Exited
    | Done
    | Failed
)

# Commands. Each has exactly one answer: `Done`, `Failed` or the requested list.


@dataclass(frozen=True)
class Reserve:
    """To the provider: reserve what a worker needs."""

    ticket: int
    member: str


@dataclass(frozen=True)
class Launch:
    """To the provider: start a worker under this id in a reserved pool member."""

    ticket: int
    member: str
    worker: str


@dataclass(frozen=True)
class Drain:
    """To the store and the provider: place no more sessions on this worker."""

    ticket: int
    member: str
    worker: str


@dataclass(frozen=True)
class Release:
    """To the provider: end the worker, if there is one, and give the member's resources back."""

    ticket: int
    member: str
    worker: str | None
    reason: str
    declared_gone: bool = False
    """Whether the worker was declared gone. Its sessions are elsewhere, so its end need not be orderly."""


@dataclass(frozen=True)
class DeclareGone:
    """To the store: declare this worker gone."""

    ticket: int
    worker: str
    reason: str


@dataclass(frozen=True)
class ListProviderWorkers:
    """To the provider: list the pool's living workers."""

    ticket: int


@dataclass(frozen=True)
class ListWorkers:
    """To the store: list the workers that are not gone, with their numbers of sessions."""

    ticket: int


Command = Reserve | Launch | Drain | Release | DeclareGone | ListProviderWorkers | ListWorkers
