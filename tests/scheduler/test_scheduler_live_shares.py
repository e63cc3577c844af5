"""Shares in the running scheduler: when they are solved, who follows them, and what happens without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any, cast

import pytest

from tests.scheduler.test_scheduler_core import session, worker
from turboserve.allocation.classes import SessionClass
from turboserve.bus import Bus
from turboserve.clock import SystemClock
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.worker_offers import ServedClass
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.scheduler import executor
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.executor import Executor
from turboserve.scheduler.live_shares import problems_of
from turboserve.scheduler.messages import (
    AllListed,
    Answered,
    BeginMigration,
    Command,
    Event,
    ListAll,
    Place,
    SessionChanged,
    SharesSolved,
    SolveShares,
    Tick,
    WorkerChanged,
)
from turboserve.scheduler.placement import (
    Cluster,
    Migration,
    MinMax,
    MinMaxRebalancer,
    Weights,
    solve_shares,
)
from turboserve.scheduler.placement.quota_preference import QuotaGuard
from turboserve.scheduler.placement.share_keeper import quotas_of_problems
from turboserve.scheduler.policy import Policy
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.scheduler.view import View

A, B = SessionClass("m"), SessionClass("n")
DIGESTS = {"m": "1" * 32, "n": "2" * 32}


def offer(name: str, **served: int) -> WorkerRecord:
    """A worker that serves several classes, or one: class → n_j."""
    classes = tuple(
        ServedClass(
            model=model,
            capacity=alone,
            weights_digest=DIGESTS[model],
            chunk_latency_s={n: 0.75 * n / alone for n in range(1, alone + 1)},
        )
        for model, alone in served.items()
    )
    first = classes[0]
    row = worker(name, capacity=first.capacity, weights=first.weights_digest)
    return row.model_copy(
        update={
            "model": first.model,
            "chunk_latency_s": first.chunk_latency_s,
            "classes": classes if len(classes) > 1 else None,
            "transfer": ("tcp://127.0.0.1:1",),
        }
    )


def running(name: str, model: str, on: str) -> SessionRecord:
    return session(
        name,
        model=model,
        worker=on,
        epoch=1,
        phase=Phase.ACTIVE,
        weights_digest=DIGESTS[model],
        next_chunk=3,
    )


class Pool:
    """A core with a store that does at once what the core asks, and a solver that can be made to fail."""

    def __init__(self, *known: WorkerRecord | SessionRecord, policy: Policy | None = None) -> None:
        rebalancer = MinMaxRebalancer(Weights(eta=0.0))
        self.core = Scheduler(MinMax(rebalancer), policy or Policy(), rebalancer, rebalancer.links)
        self.now = 0.0
        self.rows = {row.id: row for row in known if isinstance(row, SessionRecord)}
        self.workers = tuple(row for row in known if isinstance(row, WorkerRecord))
        self.sent: list[tuple[float, Command]] = []
        self.solves = True
        self.fails: str | None = None
        self.feed(Tick())

    def feed(self, event: Event) -> None:
        commands = self.core.handle(event, self.now)
        self.check([command for command in commands if isinstance(command, BeginMigration)])
        for command in commands:
            self.sent.append((self.now, command))
            self.answer(command)

    def check(self, migrations: list[BeginMigration]) -> None:
        """Check that migrations that begin together undo nothing that the quotas ask for."""
        held = self.held()
        for one in migrations:
            row = self.rows[one.session]
            there, here = held.setdefault(one.worker, Counter()), held[row.worker or ""]
            if (quotas := self.cluster.quotas.get(row.model)) is not None:
                within = here[row.model] <= quota(quotas, row.worker, row.model)
                assert not within or there[row.model] < quota(quotas, one.worker, row.model), one
            here[row.model] -= 1
            there[row.model] += 1

    def answer(self, command: Command) -> None:
        match command:
            case ListAll(ticket):
                self.feed(AllListed(ticket, self.workers, tuple(self.rows.values())))
            case SolveShares(ticket, problems):
                if self.fails is not None:
                    self.feed(SharesSolved(ticket, error=self.fails))
                elif self.solves:
                    self.feed(SharesSolved(ticket, quotas_of_problems(solve_shares, problems)))
            case Place(ticket):
                epoch = self.rows[command.session].epoch + 1
                changes = {"phase": Phase.ACTIVE, "worker": command.worker, "epoch": epoch}
                self.feed(Answered(ticket, self.put(command.session, **changes)))
            case BeginMigration(ticket):
                migration = self.rows[command.session].epoch
                begun = {"phase": Phase.MIGRATING, "target": command.worker, "migration": migration}
                self.feed(Answered(ticket, self.put(command.session, **begun)))
                ended = {"phase": Phase.ACTIVE, "worker": command.worker, "epoch": migration + 1}
                self.feed(SessionChanged(self.put(command.session, **ended, target=None, migration=None)))
            case _:
                pass

    def put(self, name: str, **changes: Any) -> SessionRecord:
        row = self.rows[name]
        self.rows[name] = row.model_copy(update={**changes, "version": row.version + 1})
        return self.rows[name]

    def come(self, name: str, model: str) -> None:
        self.rows[name] = session(name, model=model)
        self.feed(SessionChanged(self.rows[name]))

    def end(self, name: str) -> None:
        self.feed(SessionChanged(self.put(name, phase=Phase.TERMINATED)))
        del self.rows[name]

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            # Workers report, so that none becomes suspect.
            for row in self.workers:
                known = self.core.view.workers.get(row.id)
                if known is not None:
                    known.heard_at = self.core.listening.now
            self.feed(Tick())

    def all(self, kind: type[Any], since: float = -1.0) -> list[Any]:
        return [command for at, command in self.sent if isinstance(command, kind) and at >= since]

    @property
    def cluster(self) -> Cluster:
        return self.core.projection.cluster(self.now, self.core.listening.now)

    def quotas(self) -> dict[str, dict[str, int]]:
        return {of: dict(counts) for of, counts in self.cluster.quotas.items()}

    def held(self) -> dict[str, Counter[str]]:
        found: dict[str, Counter[str]] = {}
        for row in self.rows.values():
            if row.worker is not None and row.phase.holds_slot:
                found.setdefault(row.worker, Counter())[row.model] += 1
        return found


def quota(quotas: Mapping[str, int], worker: str | None, model: str) -> int:
    return quotas.get(f"{worker}/{model}", quotas.get(worker or "", 0))


def both(first: str = "w1", second: str = "w2") -> tuple[WorkerRecord, ...]:
    return offer(first, m=4, n=4), offer(second, m=4, n=4)


# When shares are solved


def test_shares_of_two_classes_are_solved_on_a_change_and_at_most_once_a_second() -> None:
    pool = Pool(*both(), running("m1", "m", "w1"), running("n1", "n", "w2"))
    pool.pass_time(5.0)
    assert len(pool.all(SolveShares)) == 1
    for number in range(8):
        pool.come(f"m-{number % 3}-{number}", "m") if number < 4 else pool.end(
            f"m-{(number - 4) % 3}-{number - 4}"
        )
        pool.pass_time(0.25)
    pool.pass_time(2.0)
    solved = [at for at, command in pool.sent if isinstance(command, SolveShares)]
    assert len(solved) > 1
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(solved))


def test_one_solution_is_under_way_at_a_time() -> None:
    pool = Pool(*both(), running("m1", "m", "w1"), running("n1", "n", "w2"))
    pool.pass_time(1.0)
    pool.solves = False
    pool.sent.clear()
    pool.come("m2", "m")
    pool.pass_time(3.0)
    [late] = pool.all(SolveShares)
    pool.come("m3", "m")
    pool.pass_time(3.0)
    assert len(pool.all(SolveShares)) == 1
    pool.solves = True
    pool.feed(SharesSolved(late.ticket, quotas_of_problems(solve_shares, late.problems)))
    pool.pass_time(0.5)
    # It lacked the last session.
    [_, newest] = pool.all(SolveShares)
    [problem] = newest.problems
    assert sum(known.counts.get(A, 0) for known in problem.workers) == 3


@pytest.mark.parametrize(
    "known",
    [
        (*both(), running("m1", "m", "w1")),
        (offer("w1", m=4), offer("w2", n=4), running("m1", "m", "w1"), running("n1", "n", "w2")),
        (offer("w1", m=4), offer("w2", m=2), running("m1", "m", "w1"), running("m2", "m", "w2")),
    ],
    ids=("one-class-in-use", "no-worker-of-several", "two-kinds-of-one-class"),
)
def test_where_min_max_is_the_optimum_nothing_is_solved(known: tuple[Any, ...]) -> None:
    pool = Pool(*known)
    pool.pass_time(3.0)
    pool.come("m9", "m")
    pool.pass_time(3.0)
    assert pool.rows["m9"].worker is not None
    assert not pool.all(SolveShares)
    assert pool.quotas() == {}


def test_quotas_end_with_the_sessions_of_the_second_class() -> None:
    pool = Pool(*both(), running("m1", "m", "w1"), running("n1", "n", "w2"))
    pool.pass_time(2.0)
    assert pool.quotas().keys() == {"m", "n"}
    pool.end("n1")
    pool.pass_time(2.0)
    assert pool.quotas() == {}


def test_workers_without_a_class_in_common_are_solved_apart() -> None:
    view = View()
    rows = (offer("w1", m=4, n=4), offer("w2", n=4), offer("w3", m=2))
    for row in rows:
        view.put_worker(row, 0.0)
    alone = offer("w4", m=4).model_copy(update={"model": "other"})
    view.put_worker(alone, 0.0)
    draining = offer("w5", m=4, n=4).model_copy(update={"phase": WorkerPhase.DRAINING})
    view.put_worker(draining, 0.0)
    for known in (running("m1", "m", "w1"), running("n1", "n", "w2"), session("n2", model="n")):
        view.put_session(known, 0.0)
        view.settle(view.sessions[known.id])
    [problem] = problems_of(view, 0.0, 12.0)
    assert [one.name for one in problem.workers] == ["w1", "w2", "w3"]
    assert problem.waiting == {A: 1, B: 2}


# Placement


def test_placement_prefers_quotas_and_says_so() -> None:
    """A session of class n alone fills half of w2 and a sixth of w1. Class m fits on w1 alone as well."""
    workers = offer("w1", m=4, n=6), offer("w2", m=3, n=2)
    pool = Pool(*workers, running("m1", "m", "w1"), running("n1", "n", "w2"))
    pool.pass_time(2.0)
    quotas = pool.quotas()
    pool.come("n2", "n")
    [place] = pool.all(Place)
    assert "its quota has room" in place.decision.reason
    entry = f"{place.worker}/n"
    assert place.decision.numbers["quota"] == quotas["n"][entry] > 0


def test_a_pool_serves_more_sessions_by_shares_than_by_min_max() -> None:
    """Kind x serves class n best. Min-max gives kind y its sixth session, and then no m fits anywhere."""
    known = (offer("x", m=4, n=6), offer("y", m=3, n=2), running("m1", "m", "y"), running("n1", "n", "x"))
    served = {}
    for shares in (True, False):
        pool = Pool(*known, policy=Policy(shares=shares, rebalance=False))
        pool.pass_time(2.0)
        for number, model in enumerate("nnnnnmm"):
            pool.come(f"s{number}", model)
            pool.pass_time(1.25)
        served[shares] = sum(row.worker is not None for row in pool.rows.values())
    assert served == {True: 9, False: 7}


def test_quotas_are_soft() -> None:
    pool = Pool(*both(), running("m1", "m", "w1"), running("n1", "n", "w2"))
    pool.pass_time(2.0)
    pool.solves = False
    for number in range(6):
        pool.come(f"m-{number}", "m")
    assert all(row.worker is not None for row in pool.rows.values())


def test_old_and_failed_shares_are_not_followed() -> None:
    pool = Pool(*both(), running("m1", "m", "w1"), running("n1", "n", "w2"))
    pool.pass_time(2.0)
    good = pool.quotas()
    pool.fails = "no optimum: made to fail"
    began = pool.now
    pool.come("n2", "n")
    pool.pass_time(4.0)
    assert pool.quotas() == good != {}
    assert pool.core.shares.failed == "no optimum: made to fail"
    pool.pass_time(2.0)
    assert pool.quotas() == {}
    pool.come("n3", "n")
    assert "quota" not in pool.all(Place)[-1].decision.numbers
    # The solver is tried again once a second.
    assert 4 <= len(pool.all(SolveShares, began)) <= 7
    pool.fails = None
    pool.pass_time(2.0)
    assert str(pool.core.shares.failed) == "None"
    assert pool.quotas() != {}


def test_a_solver_that_does_not_answer_is_a_warning() -> None:
    pool = Pool(*both(), running("m1", "m", "w1"), running("n1", "n", "w2"))
    pool.pass_time(2.0)
    pool.solves = False
    pool.come("n2", "n")
    pool.pass_time(4.0)
    assert pool.core.shares.failed is None
    pool.pass_time(3.0)
    assert pool.quotas() == {}
    assert str(pool.core.shares.failed) == "the solver has not answered for 5 s"
    late = pool.all(SolveShares)[-1]
    pool.solves = True
    pool.feed(SharesSolved(late.ticket, quotas_of_problems(solve_shares, late.problems)))
    assert str(pool.core.shares.failed) == "None"
    assert pool.quotas() != {}


def test_a_change_that_is_seen_with_a_solution_is_solved_too() -> None:
    sessions = [running(f"m{n}", "m", f"w{n}") for n in (1, 2)] + [
        running(f"n{n}", "n", "w2") for n in (1, 2)
    ]
    pool = Pool(*both(), *sessions, policy=Policy(rebalance=False))
    pool.pass_time(2.0)
    pool.solves = False
    pool.end("n2")
    pool.pass_time(2.0)
    [under_way] = pool.all(SolveShares, pool.now - 2.0)
    assert [[one.name for one in problem.workers] for problem in under_way.problems] == [["w1", "w2"]]
    # w1 is suspect by the time of the answer, and no other event has shown it.
    pool.core.view.workers["w1"].heard_at = pool.core.listening.now - pool.core.policy.worker_timeout_s
    pool.now += 1.0
    pool.solves = True
    pool.feed(SharesSolved(under_way.ticket, quotas_of_problems(solve_shares, under_way.problems)))
    newest = pool.all(SolveShares)[-1]
    assert [[one.name for one in problem.workers] for problem in newest.problems] == [["w2"]]


def test_shares_can_be_switched_off_or_replaced() -> None:
    pool = Pool(*both(), running("m1", "m", "w1"), running("n1", "n", "w2"), policy=Policy(shares=False))
    pool.pass_time(3.0)
    assert not pool.all(SolveShares)
    assert not SchedulerSettings(shares="off").policy().shares
    assert not SchedulerSettings(placement="least-loaded").policy().shares
    assert SchedulerSettings().policy().shares
    assert SchedulerSettings().solve() is solve_shares
    assert type(SchedulerSettings(shares="oserve").solve()).__name__ == "FlowShares"


async def test_the_shell_solves_and_reports_a_policy_that_fails() -> None:
    view = View()
    for row in both():
        view.put_worker(row, 0.0)
    for known in (running("m1", "m", "w1"), running("n1", "n", "w2")):
        view.put_session(known, 0.0)
    command = SolveShares(7, tuple(problems_of(view, 0.0, 12.0)))
    bus = cast(Bus, None)  # Nothing is sent.
    solved = await Executor(bus, SystemClock()).run(command)
    assert isinstance(solved, SharesSolved)
    assert solved.ticket == 7
    assert solved.quotas == quotas_of_problems(solve_shares, command.problems)

    def broken(*_: object) -> Any:
        raise ZeroDivisionError("a policy of another distribution")

    failed = await Executor(bus, SystemClock(), solve=broken).run(command)
    assert failed == SharesSolved(7, error="a policy of another distribution")


async def test_the_same_failure_of_the_solver_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core asks again each second, for as long as HiGHS is not installed."""
    logged: list[object] = []
    monkeypatch.setattr(executor.log, "warning", lambda said, **numbers: logged.append((said, numbers)))
    reasons = iter(["no highspy", "no highspy", None, "no highspy", "no optimum"])

    def solve(*given: Any) -> Any:
        if (reason := next(reasons)) is not None:
            raise ImportError(reason)
        return solve_shares(*given)

    view = View()
    for row in both():
        view.put_worker(row, 0.0)
    for known in (running("m1", "m", "w1"), running("n1", "n", "w2")):
        view.put_session(known, 0.0)
    command = SolveShares(7, tuple(problems_of(view, 0.0, 12.0)))
    runs = Executor(cast(Bus, None), SystemClock(), solve=solve)
    failed = [cast(SharesSolved, await runs.run(command)).error for _ in range(5)]
    assert failed == ["no highspy", "no highspy", None, "no highspy", "no optimum"]
    # Again after a success, and with another reason.
    assert [numbers["error"] for _, numbers in cast(Any, logged)] == [
        "ImportError('no highspy')",
        "ImportError('no highspy')",
        "ImportError('no optimum')",
    ]


# Rebalancing


def test_the_rebalancer_does_not_undo_what_quotas_ask_for() -> None:
    """Min-max alone relieves w1. The quotas have all sessions of class m there."""
    sessions = *(running(f"m{n}", "m", "w1") for n in range(3)), running("n1", "n", "w2")
    pool = Pool(*both(), *sessions, policy=Policy(rebalance=False, shares=False))
    cluster, rebalancer = pool.cluster, MinMaxRebalancer(Weights(eta=0.0))
    [one] = rebalancer.propose(cluster, 0.0)
    assert (one.source, one.target) == ("w1/m", "w2/m")
    cluster.put_quotas({"m": {"w1/m": 3}, "n": {"w2/n": 1}})
    assert rebalancer.propose(cluster, 0.0) == []
    # A session beyond its worker's quota may go anywhere, and any session to a worker below its quota.
    for quotas in ({"w1/m": 2}, {"w1/m": 3, "w2/m": 1}):
        cluster.put_quotas({"m": quotas, "n": {"w2/n": 1}})
        [one] = rebalancer.propose(cluster, 0.0)
        assert one.target == "w2/m"


def test_migrations_that_begin_together_undo_no_quota_either() -> None:
    sessions = *(running(f"m{n}", "m", "w1") for n in range(4)), running("n1", "n", "w2")
    pool = Pool(*both(), *sessions, policy=Policy(rebalance=False, shares=False))
    cluster = pool.cluster
    cluster.put_quotas({"m": {"w1/m": 3, "w2/m": 1}})
    first, second, third = (
        Migration(f"m{n}", "w1/m", "w2/m", gain_s=0.1, cost_s=0.0, reason="") for n in range(3)
    )
    guard = QuotaGuard(cluster)
    # The first leaves w1 with as many as it should have, and fills the quota of w2.
    for one in (first, second):
        assert guard.refuses(one) == (one is second)
        guard.begun(one)
    assert guard.refuses(third)
    cluster.put_quotas({})
    assert not guard.refuses(third)


@pytest.mark.parametrize("number", range(12))
def test_migrations_end_under_quotas_and_none_undoes_them(number: int) -> None:
    """Sessions come and go on a drawn pool, and migrate without any rest. `Pool.check` checks each."""
    chance = Random(f"live shares {number}")
    kinds = [{"m": chance.randint(1, 6), "n": chance.randint(1, 6)} for _ in range(chance.randint(1, 3))]
    kinds += [{chance.choice("mn"): chance.randint(1, 4)}]
    workers = [offer(f"w{n}", **chance.choice(kinds)) for n in range(chance.randint(2, 5))]
    workers.append(offer("w9", **kinds[0]))
    pool = Pool(*workers, policy=Policy(migration_cooldown_s=0.01))
    for step in range(40):
        present = [name for name, row in pool.rows.items() if row.worker is not None]
        if present and chance.random() < 0.4:
            pool.end(chance.choice(present))
        else:
            pool.come(f"s{step:02}", chance.choice("mn"))
        pool.pass_time(chance.choice((0.25, 1.25)))
    pool.pass_time(20.0)
    settled = pool.now
    pool.pass_time(10.0)
    assert pool.all(Place)
    assert not pool.all(BeginMigration, settled)
    pool.feed(WorkerChanged(offer("w9", **kinds[0]).model_copy(update={"phase": WorkerPhase.GONE})))
    pool.pass_time(3.0)
    assert not any(name.startswith("w9") for of in pool.quotas().values() for name in of)
