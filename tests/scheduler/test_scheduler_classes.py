"""Workers that serve several classes: decisions with one class in use, and with several."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from tests.scheduler.scheduler_faults import MANY
from tests.scheduler.scheduler_world import World
from tests.scheduler.test_scheduler_core import Bench, session, worker
from turboserve.contracts.sessions import Phase
from turboserve.contracts.worker_offers import ServedClass
from turboserve.contracts.workers import LoadReport, WorkerPhase, WorkerRecord
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.hand_over import hand_over
from turboserve.scheduler.messages import (
    AllListed,
    BeginMigration,
    Command,
    Event,
    ListAll,
    LoadReported,
    Place,
    SendFeedback,
    SessionChanged,
    SolveShares,
    Tick,
    WorkerChanged,
    WorkersListed,
)
from turboserve.scheduler.placement import MinMax, MinMaxRebalancer
from turboserve.scheduler.policy import Policy
from turboserve.scheduler.view import View
from turboserve.scheduler.worker_classes import WorkerClasses, newest_classes

UNUSED = "a-class-without-sessions"


def declared(row: Any) -> Any:
    """Return the row or report with a second class, of which nothing is ever wanted."""
    if not isinstance(row, WorkerRecord | LoadReport) or not row.capacity:
        return row
    own = ServedClass(
        model=row.model,
        capacity=row.capacity,
        weights_digest=row.weights_digest,
        chunk_latency_s=row.chunk_latency_s,
    )
    other = ServedClass(model=UNUSED, capacity=3, weights_digest="3" * 32)
    return row.model_copy(update={"classes": (own, other)})


def with_classes(event: Event) -> Event:
    match event:
        case WorkerChanged(record):
            return WorkerChanged(declared(record))
        case LoadReported(report):
            return replace(event, report=declared(report))
        case WorkersListed(ticket, workers):
            return WorkersListed(ticket, tuple(map(declared, workers)))
        case AllListed(ticket, workers, sessions):
            return AllListed(ticket, tuple(map(declared, workers)), sessions)
    return event


class DecidedWorld(World):
    """Notes what the scheduler decides."""

    several = False

    def scheduler(self) -> Scheduler:
        rebalancer = MinMaxRebalancer()
        return Scheduler(MinMax(rebalancer), self.policy, rebalancer, rebalancer.links)

    def __init__(self, seed: int) -> None:
        self.decided: list[tuple[Any, ...]] = []
        self.fed: tuple[Any, ...] = ()
        super().__init__(seed, MANY)

    def feed(self, event: Event, generation: int) -> None:
        super().feed(with_classes(event) if self.several else event, generation)

    def check(self, command: Command) -> None:
        super().check(command)
        assert not isinstance(command, SolveShares), "one class alone has sessions"
        at = round(self.now, 6)
        if isinstance(command, Place | BeginMigration):
            self.decided.append((at, type(command).__name__, command.session, command.worker))
        elif isinstance(command, SendFeedback) and command.feedback.model != UNUSED:
            fed = tuple(command.feedback.model_dump(exclude={"floor_capacity"}).values())
            # A change of another class's load repeats that of this one.
            if fed != self.fed:
                self.fed = fed
                self.decided.append((at, *fed))


class SeveralWorld(DecidedWorld):
    several = True


def decisions(world: DecidedWorld) -> list[tuple[Any, ...]]:
    for _ in range(60):
        for _ in range(world.random.choice((0, 0, 1, 1, 4))):
            world.fiddle()
        world.run(0.5)
    return world.decided


@pytest.mark.parametrize("seed", range(4))
def test_a_class_without_sessions_changes_no_decision(seed: int) -> None:
    plain, several = decisions(DecidedWorld(seed)), decisions(SeveralWorld(seed))
    kinds = Counter(one[1] for one in plain)
    assert kinds["Place"] > 10
    assert several == plain


def two_classes(name: str) -> WorkerRecord:
    """A worker of two large sessions, or of six small ones."""
    large = ServedClass(model="m", capacity=2, weights_digest="1" * 32, chunk_latency_s={1: 0.3, 2: 0.6})
    small = ServedClass(model="n", capacity=6, weights_digest="2" * 32, chunk_latency_s={1: 0.1, 6: 0.6})
    row = worker(name, capacity=2, weights="1" * 32)
    return row.model_copy(update={"classes": (large, small), "transfer": ("tcp://127.0.0.1:1",)})


class MigratingBench(Bench):
    """A bench whose scheduler migrates sessions."""

    def __init__(self, *known: Any) -> None:
        super().__init__()
        rebalancer = MinMaxRebalancer()
        self.core = Scheduler(MinMax(rebalancer), Policy(), rebalancer, rebalancer.links)
        self.out = []
        self.feed(Tick())
        workers = tuple(row for row in known if isinstance(row, WorkerRecord))
        sessions = tuple(row for row in known if not isinstance(row, WorkerRecord))
        self.feed(AllListed(self.take(ListAll).ticket, workers, sessions))


def running(name: str, model: str, on: str) -> Any:
    digest = "1" * 32 if model == "m" else "2" * 32
    return session(
        name, model=model, worker=on, epoch=1, phase=Phase.ACTIVE, weights_digest=digest, next_chunk=3
    )


def placed(bench: Bench) -> Counter[tuple[str, str]]:
    """Confirm all placements. Returns how many sessions of which model went to which worker."""
    counts: Counter[tuple[str, str]] = Counter()
    while bench.all(Place):
        place = bench.take(Place)
        row = bench.core.view.sessions[place.session].record
        counts[row.model, place.worker] += 1
        bench.confirm(place, row)
        bench.pass_time(0.5)
    return counts


def parts(counts: Counter[tuple[str, str]], name: str) -> Fraction:
    return Fraction(counts["m", name], 2) + Fraction(counts["n", name], 6)


def test_sessions_of_both_classes_fill_a_worker_and_no_more() -> None:
    # One decision places sessions of both classes: together they would not fit.
    waiting = [session(f"m{n}", model="m") for n in range(3)] + [
        session(f"n{n}", model="n") for n in range(9)
    ]
    bench = Bench(two_classes("w1"), two_classes("w2"), *waiting)
    bench.pass_time(2.0)
    counts = placed(bench)
    assert {of for of, _ in counts} == {"m", "n"}
    for name in ("w1", "w2"):
        assert parts(counts, name) <= 1
        # Neither class would fit once more.
        assert parts(counts, name) + Fraction(1, 6) > 1
    load = bench.core.view.workers["w1"]
    assert len(load.used) == counts["m", "w1"] + counts["n", "w1"]


def test_the_load_of_a_worker_counts_sessions_of_all_classes_in_those_of_the_first() -> None:
    bench = Bench(two_classes("w1"), running("m1", "m", "w1"), running("n1", "n", "w1"))
    bench.out.clear()
    bench.pass_time(10.0)
    newest = {one.feedback.model: one.feedback for one in bench.all(SendFeedback)}
    # 1/2 + 1/6 of the worker: 4/3 of two large sessions, four of six small ones.
    assert (newest["m"].required, newest["m"].own_required, newest["m"].capacity) == (2, 1, 2)
    assert newest["m"].rho_max == pytest.approx(2 / 3)
    assert (newest["n"].required, newest["n"].own_required, newest["n"].capacity) == (4, 1, 6)
    assert newest["n"].rho_max == pytest.approx(4 / 6)


def test_the_load_of_a_pool_is_rounded_up_once() -> None:
    names = ("w1", "w2", "w3")
    bench = Bench(*map(two_classes, names), *(running(f"n-{name}", "n", name) for name in names))
    bench.out.clear()
    bench.pass_time(10.0)
    newest = {one.feedback.model: one.feedback for one in bench.all(SendFeedback)}
    # 1/3 of a large session on each worker.
    assert (newest["m"].required, newest["m"].own_required) == (1, 0)
    assert newest["m"].rho_max == pytest.approx(1 / 6)
    assert newest["n"].required == 3


def test_counts_by_class_follow_the_sessions_of_a_worker() -> None:
    bench = Bench(two_classes("w1"), running("m1", "m", "w1"), *(running(f"n{i}", "n", "w1") for i in "12"))
    view = bench.core.view
    assert view.workers["w1"].used_of == Counter(m=1, n=2)
    bench.feed(SessionChanged(running("n1", "n", "w1").model_copy(update={"version": 9})))
    assert view.workers["w1"].used_of == Counter(m=1, n=2)
    ended = running("n1", "n", "w1").model_copy(update={"version": 10, "phase": Phase.TERMINATED})
    bench.feed(SessionChanged(ended))
    paused = running("m1", "m", "w1").model_copy(update={"version": 9, "phase": Phase.SUSPENDED})
    bench.feed(SessionChanged(paused))
    assert +view.workers["w1"].used_of == Counter(n=1)
    # A worker that is added later counts the sessions that name it.
    bench.feed(SessionChanged(running("m2", "m", "w2")))
    bench.feed(WorkerChanged(two_classes("w2")))
    assert view.workers["w2"].used_of == Counter(m=1)


def test_sessions_that_are_handed_over_fit_the_room_of_all_classes() -> None:
    draining = two_classes("w1").model_copy(update={"phase": WorkerPhase.DRAINING})
    other = two_classes("w2")
    assert other.classes is not None
    weights = tuple(one.model_copy(update={"weights_digest": "3" * 32}) for one in other.classes)
    small = [running(f"n{n}", "n", "w1") for n in range(6)]
    view = View()
    for row in (draining, other.model_copy(update={"classes": weights})):
        view.put_worker(row, 0.0)
    for row in (running("m1", "m", "w1"), *small):
        view.put_session(row, 0.0)
    assert not list(hand_over(view, 0.0, 10, lambda session: view.stamp()))
    marked = {name for name, one in view.sessions.items() if one.leaves_epoch is not None}
    # One of two large sessions, so three of six small ones.
    assert marked == {"m1", "n0", "n1", "n2"}


def test_marked_sessions_that_lost_their_room_hold_no_other_class_back() -> None:
    draining = two_classes("w1").model_copy(update={"phase": WorkerPhase.DRAINING})
    other = two_classes("w2")
    assert other.classes is not None
    weights = tuple(one.model_copy(update={"weights_digest": "3" * 32}) for one in other.classes)
    view = View()
    for row in (draining, other.model_copy(update={"classes": weights})):
        view.put_worker(row, 0.0)
    for row in (running("m1", "m", "w1"), running("m2", "m", "w1")):
        view.put_session(row, 0.0)
    assert not list(hand_over(view, 0.0, 2, lambda session: view.stamp()))
    assert view.wanting == {"m1", "m2"}
    # Others come first: of the target, one sixth is left.
    for row in (running("m9", "m", "w2"), running("n8", "n", "w2"), running("n9", "n", "w2")):
        view.put_session(row, 0.0)
    view.put_session(running("n1", "n", "w1"), 0.0)
    assert not list(hand_over(view, 0.0, 2, lambda session: view.stamp()))
    assert view.wanting == {"m1", "m2", "n1"}


def test_a_session_whose_class_has_only_paused_slabs_asks_for_a_worker() -> None:
    row = two_classes("w1")
    assert row.classes is not None
    paused = row.classes[0], row.classes[1].model_copy(update={"capacity": 0})
    waiting = [session(f"new{n}", model="n") for n in range(2)]
    bench = Bench(row.model_copy(update={"classes": paused}), *waiting)
    bench.out.clear()
    bench.pass_time(10.0)
    newest = {one.feedback.model: one.feedback for one in bench.all(SendFeedback)}
    # A whole worker more than the one that is there, which has no session.
    assert (newest["m"].required, newest["m"].waiting, newest["m"].capacity) == (2, 2, 2)
    bench.feed(SessionChanged(running("m1", "m", "w1")))
    bench.pass_time(2.0)
    newest = {one.feedback.model: one.feedback for one in bench.all(SendFeedback)}
    assert newest["m"].required == 3


def test_a_worker_of_several_classes_leaves_no_entry_behind() -> None:
    suspended = running("n1", "n", "w1").model_copy(update={"phase": Phase.SUSPENDED})
    bench = Bench(two_classes("w1"), running("m1", "m", "w1"), suspended)
    bench.pass_time(1.0)
    assert {"w1/m", "w1/n"} <= bench.core.projection.cluster(bench.now, 0.0).entries.keys()
    bench.feed(WorkerChanged(two_classes("w1").model_copy(update={"phase": WorkerPhase.GONE})))
    bench.pass_time(1.0)
    cluster = bench.core.projection.cluster(bench.now, 0.0)
    assert not any(name.startswith("w1/") for name in cluster.entries)
    assert {cluster.sessions[name].worker for name in ("m1", "n1")} == {"w1"}


def test_a_draining_worker_hands_sessions_of_each_class_to_one_that_serves_it() -> None:
    draining = two_classes("w1").model_copy(update={"phase": WorkerPhase.DRAINING})
    only_small = worker("w3", capacity=6, weights="2" * 32).model_copy(
        update={"model": "n", "transfer": ("tcp://127.0.0.1:2",)}
    )
    sessions = [running("m1", "m", "w1"), running("n1", "n", "w1")]
    bench = MigratingBench(draining, two_classes("w2"), only_small, *sessions)
    bench.pass_time(3.0)
    targets = {one.session: one.worker for one in bench.all(BeginMigration)}
    assert targets.keys() == {"m1", "n1"}
    # Reasons name workers, not the entries of their classes.
    assert all("w1 is draining; " in one.decision.reason for one in bench.all(BeginMigration))
    assert not any("/" in one.decision.reason for one in bench.all(BeginMigration))
    # The worker of small sessions alone does not get the large one.
    assert targets["m1"] == "w2"


def test_a_draining_worker_of_one_class_hands_sessions_to_one_that_serves_several() -> None:
    draining = worker("w1", capacity=6, weights="2" * 32, phase=WorkerPhase.DRAINING).model_copy(
        update={"model": "n", "transfer": ("tcp://127.0.0.1:2",)}
    )
    bench = MigratingBench(draining, two_classes("w2"), running("n1", "n", "w1"))
    bench.pass_time(3.0)
    assert {one.session: one.worker for one in bench.all(BeginMigration)} == {"n1": "w2"}


def test_a_late_report_from_the_loading_phase_does_not_replace_classes() -> None:
    loaded = two_classes("w1").classes
    loading = (ServedClass(model="m", capacity=0), ServedClass(model="n", capacity=0))
    assert loaded is not None
    assert newest_classes(loading, None) == WorkerClasses(loading)
    assert newest_classes(loaded, WorkerClasses(loading)) == WorkerClasses(loaded)
    assert newest_classes(loading, WorkerClasses(loaded)) == WorkerClasses(loaded)


def report_of(row: WorkerRecord, **more: object) -> LoadReport:
    fields: dict[str, object] = {"worker": row.id, "model": row.model, "capacity": row.capacity}
    fields |= {"phase": WorkerPhase.READY, "started_at": row.started_at}
    return LoadReport.model_validate({**fields, "classes": row.classes, **more})


def test_only_an_early_or_late_report_without_classes_leaves_the_known_ones() -> None:
    row = two_classes("w1").model_copy(update={"started_at": 5.0})
    view = View()
    view.put_worker(row, 0.0)

    def classes_after(**more: object) -> bool:
        view.put_report(report_of(row, classes=None, **more), 0.0, 0.0)
        return view.workers["w1"].classes is not None

    assert classes_after(phase=WorkerPhase.STARTING)
    assert classes_after(started_at=4.0)
    # The process was restarted, and loads one class.
    assert classes_after(phase=WorkerPhase.STARTING, started_at=6.0)
    assert not classes_after(started_at=6.0)
    assert not view.workers["w1"].serves("n")


def test_a_batch_size_on_the_known_curve_of_a_class_is_no_change_from_outside() -> None:
    row = two_classes("w1")
    view = View()
    worker = view.put_worker(row, 0.0)
    assert worker is not None
    assert row.classes is not None
    before = worker.changed_outside
    small = row.classes[1].model_copy(update={"chunk_latency_s": {1: 0.1, 3: 0.3, 6: 0.6}})
    view.put_report(report_of(row, classes=(row.classes[0], small)), 0.0, 0.0)
    assert worker.classes is not None
    assert worker.classes.served[1].chunk_latency_s.keys() == {1, 3, 6}
    assert worker.changed_outside == before
    slower = small.model_copy(update={"chunk_latency_s": {1: 0.1, 3: 0.4, 6: 0.6}})
    view.put_report(report_of(row, classes=(row.classes[0], slower)), 0.0, 0.0)
    assert worker.changed_outside > before


def test_a_session_of_one_class_migrates_for_a_gain_that_each_class_has() -> None:
    both = [running("m0", "m", "w1"), running("n1", "n", "w1")]
    bench = MigratingBench(two_classes("w1"), two_classes("w2"), *both)
    bench.pass_time(2.0)
    [begin] = bench.all(BeginMigration)
    assert begin.worker == "w2"
