"""Sessions beyond K: when the scheduler places them, what it reports of them, and how they leave again."""

from __future__ import annotations

import pytest

from turboserve.contracts.base import NUMBER_LIMIT
from turboserve.contracts.decoding import DecodeCapacity
from turboserve.contracts.errors import NoCapacityError
from turboserve.contracts.pool import LoadFeedback, PoolStatus
from turboserve.contracts.sessions import Decision, Phase, SessionRecord
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord
from turboserve.scheduler.absorption import POOL_SILENT_S
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.messages import (
    AllListed,
    Answered,
    BeginMigration,
    Command,
    ListAll,
    LoadReported,
    MigrationRequested,
    Place,
    PoolReported,
    RecordDecision,
    Reply,
    SendFeedback,
    SessionChanged,
    Tick,
    WorkerChanged,
)
from turboserve.scheduler.placement import MinMax, MinMaxRebalancer
from turboserve.scheduler.policy import Policy

MODEL = "m"


class Bench:
    """A scheduler with workers of K = 2 and K_floor = 4, and a store that carries out every placement."""

    def __init__(self, *workers: str) -> None:
        self.now = 0.0
        self.core = Scheduler(MinMax(), Policy(idle_after_s=1e9, worker_timeout_s=1e9), MinMaxRebalancer())
        self.decisions: list[Decision] = []
        self.begun: list[BeginMigration] = []
        self.replies: list[Reply] = []
        self.feedback: list[LoadFeedback] = []
        self.rows: dict[str, SessionRecord] = {}
        self.workers = list(workers)
        self.feed(Tick())
        for name in workers:
            self.report(name)

    def feed(self, *events: object) -> None:
        queue = [command for event in events for command in self.core.handle(event, self.now)]  # type: ignore[arg-type]
        while queue:
            queue += self._carry_out(queue.pop(0))

    def _carry_out(self, command: Command) -> list[Command]:
        match command:
            case ListAll(ticket):
                rows = tuple(row(name) for name in self.workers)
                return self.core.handle(AllListed(ticket, rows, tuple(self.rows.values())), self.now)
            case Place():
                self.decisions.append(command.decision)
                old = self.rows[command.session]
                placed = {"worker": command.worker, "phase": Phase.ACTIVE, "epoch": old.epoch + 1}
                after = old.model_copy(update={"version": old.version + 1, **placed})
                self.rows[command.session] = after
                return self.core.handle(Answered(command.ticket, record=after), self.now)
            case RecordDecision(decision):
                self.decisions.append(decision)
            case BeginMigration():
                self.begun.append(command)
            case Reply():
                self.replies.append(command)
            case SendFeedback(feedback):
                self.feedback.append(feedback)
            case _:
                pass
        return []

    def report(self, name: str, floor: int | None = 4, **more: object) -> None:
        values = {"worker": name, "model": MODEL, "phase": WorkerPhase.READY, "capacity": 2}
        values |= {"transfer": ("here",), "floor_capacity": floor}
        self.feed(LoadReported(LoadReport.model_validate({**values, **more})))

    def pool(self, absorbs: bool, model: str | None = MODEL, pool: str = "local") -> None:
        self.feed(PoolReported(PoolStatus(provider="local", pool=pool, model=model, absorbs=absorbs)))

    def create(self, count: int) -> None:
        for _ in range(count):
            name = f"s{len(self.rows):02}"
            self.rows[name] = SessionRecord(
                id=name, tenant="t", model=MODEL, prompt="", seed=0, phase=Phase.REQUESTED, version=1,
                epoch=0, created_at=self.now, updated_at=self.now,
            )  # fmt: skip
            self.feed(SessionChanged(self.rows[name]))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            self.feed(Tick())

    def loads(self) -> list[int]:
        return [sum(row.worker == name for row in self.rows.values()) for name in self.workers]


def row(name: str) -> WorkerRecord:
    return WorkerRecord(
        id=name,
        model=MODEL,
        phase=WorkerPhase.READY,
        capacity=2,
        transfer=("here",),
        started_at=1,
        renewed_at=1,
    )


def test_k_comes_first_then_k_floor_then_waiting() -> None:
    bench = Bench("a", "b")
    bench.pool(absorbs=True)
    bench.create(9)
    assert bench.loads() == [4, 4]
    kinds = [decision.kind for decision in bench.decisions]
    assert kinds == ["place"] * 8 + ["wait"]
    lowered = ["chunks get lower fidelity" in decision.reason for decision in bench.decisions]
    assert lowered == [False] * 4 + [True] * 4 + [False]
    assert [d.numbers.get("floor_capacity") for d in bench.decisions[3:5]] == [None, 4]
    assert bench.decisions[4].numbers["capacity"] == 2


@pytest.mark.parametrize(
    ("absorbs", "model", "floor"),
    [(False, MODEL, 4), (True, None, 4), (True, "another", 4), (True, MODEL, None)],
)
def test_without_absorption_a_full_pool_lets_sessions_wait(
    absorbs: bool, model: str | None, floor: int | None
) -> None:
    bench = Bench("a")
    bench.report("a", floor)
    bench.pool(absorbs, model)
    bench.create(3)
    assert bench.loads() == [2]


def test_waiting_sessions_are_placed_as_soon_as_the_pool_absorbs() -> None:
    bench = Bench("a")
    bench.create(3)
    bench.pool(absorbs=True)
    assert bench.loads() == [3]


def test_a_silent_pool_absorbs_no_longer_and_another_pool_may() -> None:
    bench = Bench("a")
    bench.pool(absorbs=True)
    bench.pass_time(POOL_SILENT_S + 1.0)
    bench.create(3)
    assert bench.loads() == [2]
    bench.pool(absorbs=False)
    bench.pool(absorbs=True, pool="other")
    assert bench.loads() == [3]


def test_no_session_is_placed_beyond_k_from_the_moment_at_which_a_pool_counts_as_silent() -> None:
    bench = Bench("a")
    bench.pool(absorbs=True)
    bench.create(2)
    bench.pass_time(POOL_SILENT_S)
    # Too early for the next look at all workers.
    bench.now += 0.05
    bench.create(1)
    assert bench.loads() == [2]


def test_load_keeps_its_meaning_and_reports_quality() -> None:
    bench = Bench("a", "b")
    bench.pool(absorbs=True)
    bench.create(6)
    bench.report("a", quality_debt=0.5, deficit=1.5)
    bench.report("b", quality_debt=0.1)
    bench.pass_time(1.5)
    told = bench.feedback[-1]
    assert (told.rho_max, told.capacity, told.floor_capacity) == (1.5, 4, 8)
    assert told.deficit == 1.5
    assert told.quality_debt == pytest.approx((3 * 0.5 + 3 * 0.1) / 6)


def test_feedback_without_floors_is_as_before() -> None:
    bench = Bench()
    bench.workers.append("a")
    bench.feed(WorkerChanged(row("a")))
    bench.create(1)
    bench.pass_time(1.5)
    told = bench.feedback[-1]
    assert (told.floor_capacity, told.quality_debt, told.deficit) == (None, 0.0, 0.0)


def test_feedback_says_what_decode_workers_carry_and_k_without_them() -> None:
    bench = Bench("a", "b", "c")
    assert bench.feedback[-1].decoding is None
    # K is what decode workers allot: the reports have 2 of 5, and 2 of 2.
    bench.report("a", decoding=DecodeCapacity(workers=1, sessions=4, denoised=5))
    bench.report("b", decoding=DecodeCapacity(workers=2, sessions=6, denoised=2))
    bench.pass_time(1.5)
    told = bench.feedback[-1]
    # The third worker decodes itself, and the first one does not know all decode workers yet.
    assert told.decoding == DecodeCapacity(workers=2, sessions=6, denoised=5 + 2 + 2, own=2)
    assert told.capacity == 6
    # Those of several pools of one model may ask different ones, and some of the same.
    bench.report("a", decoding=DecodeCapacity(workers=2, sessions=10, denoised=5, each={"x": 4, "y": 6}))
    bench.report("b", decoding=DecodeCapacity(workers=2, sessions=11, denoised=2, each={"y": 6, "z": 5}))
    bench.pass_time(1.5)
    told = bench.feedback[-1]
    assert told.decoding == DecodeCapacity(workers=3, sessions=15, denoised=9, own=2)
    # A worker that ends takes its part along.
    bench.report("a", phase=WorkerPhase.DRAINING)
    bench.report("b", phase=WorkerPhase.DRAINING)
    bench.pass_time(1.5)
    assert (bench.feedback[-1].decoding, bench.feedback[-1].capacity) == (None, 2)


def test_false_numbers_of_decode_workers_do_not_end_the_scheduler() -> None:
    bench = Bench("a", "b")
    most = NUMBER_LIMIT
    for worker in ("a", "b"):
        known = DecodeCapacity(workers=2, sessions=most, denoised=most, each={"x": most, "y": most})
        bench.report(worker, decoding=known)
    bench.pass_time(1.5)
    told = bench.feedback[-1]
    assert told.decoding == DecodeCapacity(workers=2, sessions=most, denoised=most)
    assert told.capacity == 4


def test_sessions_beyond_k_go_to_a_new_worker_and_no_migration_fills_one_beyond_k() -> None:
    bench = Bench("a")
    bench.pool(absorbs=True)
    bench.create(4)
    assert bench.loads() == [4]
    bench.workers.append("b")
    bench.feed(WorkerChanged(row("b")))
    bench.report("b")
    bench.report("a")
    bench.pass_time(2.0)
    assert len(bench.begun) == 2
    assert {command.worker for command in bench.begun} == {"b"}


def test_an_operators_migration_puts_no_worker_above_k() -> None:
    """The store would refuse it. Found by a simulation with all mechanisms (seed 500039)."""
    bench = Bench("a", "b")
    bench.pool(absorbs=True)
    bench.create(4)
    assert bench.loads() == [2, 2]
    bench.feed(MigrationRequested(1, "s00"))
    assert bench.begun == []
    [reply] = bench.replies
    assert isinstance(reply.error, NoCapacityError)
