"""Invariants of deployments with decode workers: sessions are placed within what these carry."""

from __future__ import annotations

from typing import Protocol

from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.simulation.role_workers import RoleWorker
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.rows.server import MemoryPostgres
from turboserve.simulation.service import ServiceProcess
from turboserve.simulation.settings import Scale
from turboserve.simulation.virtual_worker import VirtualWorker
from turboserve.worker.engine.decoding_apart import OWN_CACHES


class RoleDeployment(Protocol):
    """The deployment as these checks use it."""

    loop: VirtualLoop
    scale: Scale
    postgres: MemoryPostgres
    role_workers: dict[str, RoleWorker]

    def worker(self, name: str | None) -> VirtualWorker | None: ...
    def slots_used(self, worker: str) -> int: ...
    def living_role_workers(self) -> list[ServiceProcess]: ...


class Failures(Protocol):
    """Where violations are reported."""

    def fail(self, name: str, message: str) -> None: ...


class RoleChecks:
    """Checks nothing in a deployment without decode workers."""

    def __init__(self, reports: Failures, world: RoleDeployment) -> None:
        self._reports, self._world = reports, world

    @property
    def _active(self) -> bool:
        roles = self._world.scale.roles
        return roles is not None and roles.decoders > 0

    def placed(self, before: SessionRecord | None, after: SessionRecord) -> None:
        """Check a committed row whose session takes a slot: the worker's row says how many it may have."""
        if not self._active or not after.phase.holds_slot:
            return
        held = before is not None and before.phase.holds_slot
        known = {before.worker, before.target} if before is not None and held else set[str | None]()
        for name in {after.worker, after.target} - known - {None}:
            entry, used = (
                self._world.postgres.tables.workers.rows.get(str(name)),
                self._world.slots_used(str(name)),
            )
            if entry is not None and used > entry.record.most_sessions:
                self._reports.fail(
                    "capacity", f"{name} has {used} assigned, and reports {entry.record.most_sessions}"
                )

    def unsettled(self) -> str | None:
        """Return which worker reports more sessions than its decode workers allot; None if none does."""
        if not self._active:
            return None
        world = self._world
        present = (world.role_workers[service.name] for service in world.living_role_workers())
        decoders = [role.decodes for role in present if role.decodes is not None]
        for name, entry in world.postgres.tables.workers.rows.items():
            if entry.record.phase is not WorkerPhase.READY or world.worker(name) is None:
                continue
            allotted = sum(one._divided.allotment(name, world.loop.time()) for one in decoders)
            if entry.record.capacity > max(allotted, OWN_CACHES):
                return f"{name} reports {entry.record.capacity} sessions, and {allotted} are allotted to it"
        return None
