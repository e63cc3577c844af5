"""Load reports with an age, in the modeled fleet of `turboserve bench paper` and `bench autoscale`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turboserve.autoscaler.control.events import SessionChange
from turboserve.contracts.pool import LoadFeedback
from turboserve.experiments.autoscale.plant import Plant, Resume
from turboserve.experiments.autoscale.production import production
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Fixed
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked
from turboserve.experiments.paper.profiles import cluster
from turboserve.experiments.paper.systems import SYSTEMS, System
from turboserve.scheduler.placement import Cluster, Migration, NeverMigrates
from turboserve.scheduler.placement.types import MigrationKind

ARRIVAL, ACTIVATION = SessionChange.ARRIVAL, SessionChange.ACTIVATION
IDLING, DEPARTURE = SessionChange.IDLING, SessionChange.DEPARTURE
AGE_S = 5.0


def trace(*changes: tuple[float, str, SessionChange]) -> WorkloadTrace:
    return checked("changes", [Step(*change) for change in changes], 20.0)


def played(given: WorkloadTrace, age_s: float, until: float, workers: int = 2) -> Simulation:
    plant = replace(cluster("H20 1.3B"), signal_age_s=age_s)
    simulation = System("load-aware").simulation(given, plant, Fixed(workers), Resume.ANYWHERE)
    simulation.advance(until)
    return simulation


class Reads(Fixed):
    """A fixed pool that keeps the feedback."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.found: list[LoadFeedback] = []
        self.changes: list[tuple[float, SessionChange]] = []

    def on_feedback(self, feedback: LoadFeedback, starting: int, now: float) -> None:
        self.found.append(feedback)

    def on_session_change(self, kind: SessionChange, now: float) -> None:
        self.changes.append((now, kind))


class MovesA(NeverMigrates):
    """Migrates session a from the first worker to the second at 2 s."""

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        state = cluster.sessions.get("a")
        if now < 2 or state is None or state.worker != "w0000" or state.target or state.suspended:
            return []
        return [Migration("a", "w0000", "w0001", 1.0, 0.0, "test", MigrationKind.BALANCE)]


@pytest.mark.parametrize(("age_s", "worker"), [(0.0, "w0000"), (AGE_S, "w0001")])
def test_a_placement_counts_sessions_that_have_left_until_the_report(age_s: float, worker: str) -> None:
    # Load-aware placement puts a and c on the first worker. Both have left when d comes.
    given = trace(
        *((0.0, name, ARRIVAL) for name in "abc"),
        (1.0, "a", DEPARTURE),
        (1.0, "c", IDLING),
        (2.0, "d", ARRIVAL),
    )
    found = played(given, age_s, 3.0)
    assert found.fleet.cluster.sessions["d"].worker == worker
    assert [found.fleet.running.on(name) for name in ("w0000", "w0001")] == (
        [1, 1] if worker == "w0000" else [0, 2]
    )
    after = played(given, age_s, 1.0 + AGE_S + 0.5)
    assert "a" not in after.fleet.cluster.sessions
    assert after.fleet.cluster.sessions["c"].suspended


def test_a_session_that_asks_for_a_slot_is_known_to_have_been_idle() -> None:
    given = trace((0.0, "a", ARRIVAL), (1.0, "a", IDLING), (2.0, "a", ACTIVATION), (3.0, "a", IDLING))
    early = played(given, AGE_S, 2.5).fleet
    assert (early.cluster.sessions["a"].suspended, early.running.on("w0000")) == (False, 1)
    # The report of the first idling is of no use any more. The second comes at 8 s.
    for until, suspended in ((7.5, False), (8.5, True)):
        assert played(given, AGE_S, until).fleet.cluster.sessions["a"].suspended is suspended


def test_sessions_that_have_left_make_no_chunks() -> None:
    drawn = production("M")
    fresh, old = (played(drawn, age_s, drawn.ends_s, 8).outcome for age_s in (0.0, AGE_S))
    assert old.session_s == pytest.approx(fresh.session_s)
    assert old.mean_s != fresh.mean_s


@pytest.mark.parametrize("kind", [IDLING, DEPARTURE])
def test_a_migration_of_a_session_that_has_left_tells_so(kind: SessionChange) -> None:
    given = trace((0.0, "a", ARRIVAL), (1.5, "a", kind), (2.5, "b", ARRIVAL))
    plant = replace(cluster("H20 1.3B"), signal_age_s=AGE_S)
    simulation = Simulation(given, plant, Fixed(2), MovesA())
    simulation.advance(3.0)
    assert simulation.outcome.migrations == 0
    known = simulation.fleet.cluster.sessions.get("a")
    assert known is None if kind is DEPARTURE else known is not None and known.suspended


def test_the_autoscaler_hears_as_late_as_the_scheduler() -> None:
    given = trace((0.0, "a", ARRIVAL), (0.5, "b", ARRIVAL), (1.0, "a", DEPARTURE), (2.0, "b", DEPARTURE))
    sizer = Reads(1)
    Simulation(given, Plant(signal_age_s=AGE_S), sizer).run()
    required = {feedback.at: feedback.required for feedback in sizer.found}
    assert [required[at] for at in (0.5, 5.0, 6.0, 7.0)] == [2, 2, 1, 0]
    assert sizer.changes == [(0.5, ARRIVAL), (6.0, DEPARTURE), (7.0, DEPARTURE)]


@pytest.mark.parametrize("name", ["base", "LAG + autoscaling", "turboserve", "without migration"])
def test_all_systems_end_with_no_session_on_a_worker(name: str) -> None:
    """Whatever is revealed early or late, each change is applied once."""
    drawn = production("M")
    gone = [
        Step(drawn.ends_s, session, DEPARTURE)
        for session in drawn.sessions
        if not any(step.session == session and step.kind is DEPARTURE for step in drawn.steps)
    ]
    whole = checked("M, then none", [*drawn.steps, *gone], drawn.ends_s + 60)
    plant = replace(cluster("H20 1.3B"), most=8, signal_age_s=AGE_S)
    system = SYSTEMS[name]
    simulation = system.simulation(whole, plant, Fixed(8), Resume.RETURNS)
    simulation.run()
    assert not simulation.fleet.cluster.sessions
    assert all(simulation.fleet.running.on(worker) == 0 for worker in simulation.fleet.cluster.entries)
