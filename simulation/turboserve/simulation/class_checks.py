"""Checks of workers that serve several classes: their polytope, and the class of what they run.

n_j and the counts are those of the simulation. No rule of the services is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from math import floor
from typing import Protocol

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import BeginMigration, Place
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.settings import Scale
from turboserve.simulation.tenants import demands
from turboserve.simulation.virtual_worker import VirtualWorker


class ClassReports(Protocol):
    """Where the checks of classes report to."""

    def fail(self, name: str, message: str) -> None:
        """Report a violation of the invariant `name`."""


class ClassDeployment(Protocol):
    """The deployment as the checks of classes use it."""

    scale: Scale
    postgres: MemoryPostgres
    workers: dict[str, VirtualWorker]
    outside: dict[str, int]

    def worker(self, name: str | None) -> VirtualWorker | None: ...
    def records(self) -> Iterator[SessionRecord]: ...


def share(models: Iterable[str], served: Mapping[str, int]) -> Fraction:
    """Return Σ x_j / n_j. A session of a class with n_j = 0 takes all of the worker."""
    return sum(
        (Fraction(1, served[model]) if served.get(model) else Fraction(1) for model in models), Fraction(0)
    )


class ClassChecks:
    """Checks rows, commands of schedulers, and forwards."""

    def __init__(self, reports: ClassReports, deployment: ClassDeployment) -> None:
        self._reports, self._deployment = reports, deployment

    def placed(self, session: SessionRecord, worker: str) -> None:
        """Check a committed row whose session takes a slot of the worker, or reserves one."""
        known = self._deployment.workers.get(worker)
        if known is None:
            return
        if session.model not in known.profiles:
            self._reports.fail("serves_class", f"{session.id} of {session.model} is assigned to {worker}")
        if self._deployment.scale.classes is None:
            return
        models = self._models_on(worker)
        if share(models, self._served(known)) > 1:
            self._reports.fail("capacity", f"{worker} has {models} of {self._served(known)}")

    def begins_chunk(self, worker: str, session: str, model: str) -> None:
        """Check the class of an engine that computes for a session."""
        row = self._deployment.postgres.tables.sessions.rows.get(session)
        if row is not None and row.record.model != model:
            self._reports.fail(
                "serves_class", f"{worker} computes {session} of {row.record.model} as {model}"
            )

    def assigned(self, core: Scheduler, command: Place | BeginMigration) -> None:
        """Check that the worker has room for what the scheduler assigns, by the scheduler's view."""
        worker = core.view.workers[command.worker]
        assert worker.classes is not None
        served = {one.model: one.capacity for one in worker.classes.served}
        session = core.view.sessions[command.session].record
        models = [core.view.sessions[name].record.model for name in worker.load_names]
        if share(models, served) > 1:
            self._reports.fail(
                "capacity", f"the scheduler assigns {sorted(models)} of {served} to {worker.id}"
            )
        if session.model not in served:
            self._reports.fail(
                "serves_class", f"the scheduler assigns {session.id} of {session.model} to {worker.id}"
            )

    def admitted(self, record: SessionRecord, ending: Iterable[str]) -> None:
        """Check an admission: workers must have room for all sessions that must run.

        There is room for fractions of sessions: a worker that serves all classes is for those sessions of a
        class that workers of this class alone do not take. `ending`: workers that are gone and count all the
        same.
        """
        deployment = self._deployment
        if deployment.scale.pool_file is not None:
            # Two classes that compete for the last worker of a kind may both be admitted.
            return
        rows = deployment.postgres.tables.workers.rows
        known = {name for name, entry in rows.items() if entry.record.phase is not WorkerPhase.GONE}
        counted = sorted(known.union(ending) & deployment.workers.keys())
        pool = [name for name in counted if name not in deployment.outside]
        alone = dict.fromkeys(deployment.scale.models, 0)
        shared = max(len(pool), deployment.scale.most_workers)
        for name in counted:
            if name in deployment.outside:
                served = self._served(deployment.workers[name])
                shared += len(served) > 1
                if len(served) == 1:
                    alone[next(iter(served))] += 1
        wanted = dict.fromkeys(alone, 0)
        for each in deployment.records():
            wanted[each.model] += demands(each)
        each_share = {
            model: max(
                Fraction(0), Fraction(wanted[model], deployment.scale.sessions_of(model)) - alone[model]
            )
            for model in alone
        }
        if each_share[record.model] > 0 and sum(each_share.values()) > shared:
            self._reports.fail("capacity", f"{record.id} is admitted, one of {wanted}: {shared} and {alone}")

    def room(self, model: str) -> int:
        """Return how many more sessions of a class fit on living workers that accept sessions, as they
        report n_j."""
        total = 0
        for name, entry in self._deployment.postgres.tables.workers.rows.items():
            record = entry.record
            if record.phase is not WorkerPhase.READY or self._deployment.worker(name) is None:
                continue
            served = {one.model: one.capacity for one in record.classes or ()} or {
                record.model: record.capacity
            }
            free = 1 - share(self._models_on(name), served)
            total += max(0, floor(free * served.get(model, 0)))
        return total

    def _served(self, worker: VirtualWorker) -> dict[str, int]:
        return {model: self._deployment.scale.sessions_of(model) for model in worker.profiles}

    def _models_on(self, worker: str) -> list[str]:
        """Return the class of each session that holds a slot of the worker or migrates to it."""
        return [
            row.model
            for row in self._deployment.records()
            if row.phase.holds_slot and worker in (row.worker, row.target)
        ]
