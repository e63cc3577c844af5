"""A worker as the scheduler and the state store see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.scheduler.served_store import WALL
from turboserve.contracts.workers import LoadReport, WorkerPhase

MODEL = "quiet"


@dataclass
class Worker:
    """One process."""

    id: str
    capacity: int
    alive: bool = True
    heard: bool = True
    """Whether its load reports reach the scheduler."""
    renewed_at: float = 0.0
    phase: WorkerPhase = WorkerPhase.READY
    """Phase in its reports; `GONE` once its row says so."""
    refused: set[tuple[str, int]] = field(default_factory=set)

    def load(self, phase: WorkerPhase | None = None, **fields: object) -> LoadReport:
        """Return its report, with the fields of a test."""
        values = {"worker": self.id, "model": MODEL, "capacity": self.capacity, "transfer": ("here",)}
        values |= {"phase": phase or self.phase, "started_at": WALL}
        return LoadReport.model_validate({**values, **fields})
