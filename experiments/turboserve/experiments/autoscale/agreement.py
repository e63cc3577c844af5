"""Compares the whole scheduler core with the simulator, which calls placement directly."""

from __future__ import annotations

from typing import Any

from turboserve.autoscaler.control.events import SessionChange
from turboserve.contracts.pool import LoadFeedback, PoolStatus
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord
from turboserve.experiments.autoscale.fleet import Fleet
from turboserve.experiments.autoscale.load_feedback import MODEL
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.trace import WorkloadTrace
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import (
    AllListed,
    Answered,
    Command,
    ListAll,
    LoadReported,
    Place,
    PoolReported,
    SendFeedback,
    SessionChanged,
    Tick,
)
from turboserve.scheduler.placement import MinMax, NeverMigrates
from turboserve.scheduler.policy import Policy


class WholeScheduler:
    """The scheduler's core with a store that answers at once, a fixed pool and no migrations."""

    def __init__(self, workers: int, plant: Plant, absorbs: bool = False) -> None:
        self.core = Scheduler(MinMax(), Policy(idle_after_s=1e9, worker_timeout_s=1e9))
        self.rows: dict[str, SessionRecord] = {}
        self.feedback: LoadFeedback | None = None
        self._workers = tuple(
            WorkerRecord(
                id=f"w{number:04d}", model=MODEL, phase=WorkerPhase.READY, capacity=plant.capacity,
                chunk_latency_s=dict(plant.latency_s), started_at=0.0, renewed_at=0.0,
            )
            for number in range(workers)
        )  # fmt: skip
        self._pool = PoolReported(PoolStatus(provider="local", model=MODEL, absorbs=absorbs))
        self._carry_out(self.core.handle(Tick(), 0.0), 0.0)
        for row in self._workers:
            report = LoadReport(
                worker=row.id,
                model=MODEL,
                phase=row.phase,
                capacity=row.capacity,
                floor_capacity=plant.floor_capacity,
            )
            self._carry_out(self.core.handle(LoadReported(report), 0.0), 0.0)

    def on_session_change(self, session: str, kind: SessionChange, now: float) -> None:
        """Apply a session's change: its row changes as by the store's transitions."""
        row = self.rows.get(session)
        if row is None:
            row = SessionRecord(
                id=session,
                tenant="t",
                model=MODEL,
                prompt="",
                seed=0,
                phase=Phase.REQUESTED,
                version=1,
                epoch=0,
                created_at=now,
                updated_at=now,
            )
        else:
            row = row.model_copy(update={"version": row.version + 1, **_change(row, kind)})
        self.rows[session] = row
        self._carry_out(self.core.handle(self._pool, now), now)
        self._carry_out(self.core.handle(SessionChanged(row), now), now)

    def _carry_out(self, commands: list[Command], now: float) -> None:
        queue = list(commands)
        while queue:
            command = queue.pop(0)
            match command:
                case ListAll(ticket):
                    listed = AllListed(ticket, self._workers, tuple(self.rows.values()))
                    queue += self.core.handle(listed, now)
                case Place():
                    old = self.rows[command.session]
                    placed = {"worker": command.worker, "phase": Phase.ACTIVE, "epoch": old.epoch + 1}
                    row = old.model_copy(update={"version": old.version + 1, **placed})
                    self.rows[command.session] = row
                    queue += self.core.handle(Answered(command.ticket, record=row), now)
                case SendFeedback(feedback):
                    self.feedback = feedback
                case _:
                    pass


def _change(row: SessionRecord, kind: SessionChange) -> dict[str, Any]:
    match kind:
        case SessionChange.DEPARTURE:
            return {"phase": Phase.TERMINATED, "worker": None}
        case SessionChange.IDLING:
            return {"phase": Phase.SUSPENDED, "activity": Activity.PAUSED}
        case _:
            return {"activity": Activity.WATCHING}


def agreement(trace: WorkloadTrace, workers: int, plant: Plant, absorbs: bool = False) -> dict[str, Any]:
    """Replay a trace through both, with a fixed pool that is large enough at times and too small at others.

    With `absorbs`, workers hold up to K_floor sessions. After every step, compares the assignment of
    sessions and the feedback (ρ_max, N_req, waiting, K and K_floor).
    """
    whole = WholeScheduler(workers, plant, absorbs)
    fleet = Fleet(plant, NeverMigrates())
    fleet.resize(workers, 0.0, ready=True)
    fleet.absorb(absorbs)
    steps = same_place = same_feedback = 0
    for step in trace.steps:
        whole.on_session_change(step.session, step.kind, step.at)
        fleet.on_session_change(step.session, step.kind, step.at)
        fleet.place(step.at)
        steps += 1
        placed = {s.id: s.worker for s in fleet.cluster.sessions.values() if s.worker}
        rows = {row.id: row.worker for row in whole.rows.values() if row.worker and not row.phase.ended}
        same_place += placed == rows
        mine, theirs = fleet.feedback(step.at), whole.feedback
        same_feedback += theirs is not None and all(
            getattr(mine, field) == getattr(theirs, field)
            for field in ("rho_max", "required", "waiting", "capacity", "workers", "floor_capacity")
        )
    return {
        "steps": steps,
        "same_placement": same_place,
        "same_feedback": same_feedback,
        "share": min(same_place, same_feedback) / max(steps, 1),
    }
