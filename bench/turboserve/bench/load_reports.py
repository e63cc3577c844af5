"""Processor time of the scheduler's core per load report, tick and event of a session, in a running pool."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping

from turboserve.contracts.fidelity import SessionSlack, Tier
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import (
    HeldSession,
    LoadReport,
    MigrationReport,
    MigrationStage,
    WorkerPhase,
    WorkerRecord,
)
from turboserve.scheduler.app import core_of
from turboserve.scheduler.messages import (
    AllListed,
    Answered,
    BeginMigration,
    Command,
    CommitMigration,
    Event,
    ListAll,
    ListWorkers,
    LoadReported,
    Place,
    SessionChanged,
    Tick,
    WorkersListed,
)
from turboserve.scheduler.settings import SchedulerSettings

MODEL = "video"
SPARE = 1.25
"""Slots of all workers, as a multiple of the sessions."""
PER_SESSION_S = 0.05
NOISE = 0.2
"""Relative spread of measured profiles between workers: they share a busy machine."""
DRIFT = 0.03
"""Relative spread of one worker's profiles between two reports."""
ARRIVALS_PER_S = 10
TICKS_PER_S = 4
WARM_UP_S = 2
HOST = "node-0/host-0"
"""All workers are near each other, so each migration has as many targets as possible."""
PROMPT = "a red circle moves to the right"


class ReportingPool:
    """Workers that report once a second to a scheduler's core, and the rows of their sessions.

    Ten sessions a second end, and as many begin. Commands are answered at once, as the state store would.
    """

    def __init__(self, workers: int, sessions: int, seed: int) -> None:
        self.core = core_of(SchedulerSettings(idle_after_s=1e6))
        self.seconds: dict[str, list[float]] = {}
        """Processor seconds by kind of event. `decode`: to read a report's message."""
        self.now = 0.0
        self.migrations = 0
        """Number of migrations that the scheduler has begun."""
        self._rng = random.Random(seed)
        self._slots = int(SPARE * sessions / workers + 0.999)
        self._scales = {
            f"wrk_{number:04}": PER_SESSION_S * self._rng.uniform(1 - NOISE, 1 + NOISE)
            for number in range(workers)
        }
        self._rows: dict[str, SessionRecord] = {}
        self._made = 0
        names = list(self._scales)
        for number in range(sessions):
            row = self._created()
            self._rows[row.id] = row.model_copy(
                update={"worker": names[number % workers], "phase": Phase.ACTIVE, "epoch": 1, "version": 2}
            )
        self._feed("tick", Tick())

    def run_for(self, seconds: int) -> None:
        """Let the pool run for some seconds of its own clock."""
        names = list(self._scales)
        steps = len(names)
        arrivals = {round(steps * number / ARRIVALS_PER_S) for number in range(ARRIVALS_PER_S)}
        ticks = {round(steps * number / TICKS_PER_S) for number in range(TICKS_PER_S)}
        began = self.now
        for second in range(seconds):
            for step, name in enumerate(names):
                self.now = began + second + step / steps
                if step in ticks:
                    self._feed("tick", Tick())
                if step in arrivals:
                    self._end(self._rng.choice(sorted(self._rows)))
                    row = self._created()
                    self._rows[row.id] = row
                    self._feed("arrival", SessionChanged(row))
                self._report(name)

    def _report(self, worker: str) -> None:
        body = self._load(worker).to_bytes()
        began = time.thread_time()
        report = LoadReport.from_bytes(body)
        self.seconds.setdefault("decode", []).append(time.thread_time() - began)
        self._feed("report", LoadReported(report))

    def _load(self, worker: str) -> LoadReport:
        held, coming = [], []
        for row in self._rows_of(worker):
            if row.worker == worker:
                slack_s = self._rng.uniform(0.5, 3.0)
                slack = SessionSlack(slack_s=slack_s, credit_s=slack_s - 0.5, tier=Tier.NORMAL)
                held.append(HeldSession(session=row.id, epoch=row.epoch, next_chunk=9, slack=slack))
            else:
                coming.append(
                    MigrationReport(
                        session=row.id,
                        migration=row.migration or 0,
                        stage=MigrationStage.VERIFIED,
                        bytes_copied=1_000_000,
                        seconds=0.1,
                    )
                )
        scale = self._scales[worker] * self._rng.uniform(1 - DRIFT, 1 + DRIFT)
        return LoadReport(
            worker=worker,
            model=MODEL,
            capacity=self._slots,
            sessions=tuple(held),
            migrations=tuple(coming),
            transfer=("tcp://127.0.0.1:1",),
            host=HOST,
            chunk_latency_s={n: scale * n for n in range(1, self._slots + 1)},
        )

    def _rows_of(self, worker: str) -> Iterator[SessionRecord]:
        view = self.core.view.workers[worker]
        for name in sorted(view.used | view.incoming):
            yield self._rows[name]

    def _feed(self, kind: str, event: Event) -> None:
        began = time.thread_time()
        commands = self.core.handle(event, self.now)
        self.seconds.setdefault(kind, []).append(time.thread_time() - began)
        for command in commands:
            answer = self._answer(command)
            if answer is not None:
                self._feed("listing" if isinstance(answer, AllListed | WorkersListed) else "answer", answer)
                if isinstance(answer, Answered) and answer.record is not None:
                    self._feed("change", SessionChanged(answer.record))

    def _answer(self, command: Command) -> Event | None:
        match command:
            case ListAll(ticket):
                return AllListed(ticket, self._workers(), tuple(self._rows.values()))
            case ListWorkers(ticket):
                return WorkersListed(ticket, self._workers())
            case Place(ticket):
                placed = {"worker": command.worker, "phase": Phase.ACTIVE}
                return Answered(ticket, self._changed(command.session, placed, owners=1))
            case BeginMigration(ticket):
                self.migrations += 1
                version = self._rows[command.session].version + 1
                begun = {"phase": Phase.MIGRATING, "target": command.worker, "migration": version}
                return Answered(ticket, self._changed(command.session, begun))
            case CommitMigration(ticket):
                ended = {"phase": Phase.ACTIVE, "worker": command.worker, "target": None, "migration": None}
                return Answered(ticket, self._changed(command.session, ended, owners=1))
            case _:
                return None

    def _changed(self, session: str, values: Mapping[str, object], owners: int = 0) -> SessionRecord:
        row = self._rows[session]
        update = {"version": row.version + 1, "epoch": row.epoch + owners, **values}
        self._rows[session] = row.model_copy(update=update)
        return self._rows[session]

    def _end(self, session: str) -> None:
        row = self._changed(
            session, {"phase": Phase.TERMINATED, "worker": None, "target": None, "migration": None}
        )
        del self._rows[session]
        self._feed("change", SessionChanged(row))

    def _created(self) -> SessionRecord:
        self._made += 1
        return SessionRecord(
            id=f"ses_{self._made:06}",
            tenant="t",
            model=MODEL,
            prompt=PROMPT,
            seed=0,
            phase=Phase.REQUESTED,
            version=1,
            epoch=0,
            created_at=self.now,
            updated_at=self.now,
        )

    def _workers(self) -> tuple[WorkerRecord, ...]:
        return tuple(
            WorkerRecord(
                id=name,
                model=MODEL,
                phase=WorkerPhase.READY,
                capacity=self._slots,
                transfer=("tcp://127.0.0.1:1",),
                host=HOST,
                started_at=1.0,
                renewed_at=1.0 + self.now,
            )
            for name in self._scales
        )


def measure_events(workers: int, sessions: int, seconds: int, seed: int) -> ReportingPool:
    """Let a pool of this size run. The first two seconds, in which the view fills, are not measured."""
    pool = ReportingPool(workers, sessions, seed)
    pool.run_for(WARM_UP_S)
    pool.seconds.clear()
    pool.migrations = 0
    pool.run_for(seconds)
    return pool
