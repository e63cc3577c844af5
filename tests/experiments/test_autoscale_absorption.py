"""The experiment `absorption`: its plant, its fronts, its files, and what absorption changes in a run."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.bench.report import BenchError
from turboserve.contracts.errors import InvalidInputError
from turboserve.experiments.autoscale import command
from turboserve.experiments.autoscale.absorption import LIMIT, PLANT, RHO, Absorbed, Front, Point
from turboserve.experiments.autoscale.outcome import DEBT_S, DebtWindow
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.production import STAY_S
from turboserve.experiments.autoscale.requests import read_any
from turboserve.experiments.autoscale.shapes import square
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, Fixed, flat_table

POINTS = st.lists(st.builds(Point, st.floats(1, 1e6), st.integers(0, 1_000)), min_size=1, max_size=20)


@given(POINTS, st.floats(1, 1e6))
def test_a_front_lies_below_all_runs_and_meets_the_best(points: list[Point], cost_s: float) -> None:
    front = Front(points)
    for point in points:
        late = front.late_at(point.cost_s)
        assert late is not None
        assert late <= point.late + 1e-6
        least_s = front.cost_at(point.late)
        assert least_s is not None
        assert least_s <= point.cost_s * (1 + 1e-9)
    assert set(front.points) <= set(points)
    assert min(point.late for point in points) == front.points[-1].late
    late = front.late_at(cost_s)
    assert (late is None) == (cost_s < min(point.cost_s for point in points))


def test_a_front_mixes_its_two_neighbors() -> None:
    front = Front([Point(100, 40), Point(200, 0), Point(150, 35), Point(300, 0)])
    assert [point.cost_s for point in front.points] == [100, 200]
    assert front.late_at(150) == 20
    assert front.cost_at(20) == 150
    assert (front.late_at(99), front.late_at(500), front.cost_at(50)) == (None, 0, 100)
    assert Front([Point(100, 3)]).cost_at(2) is None


class TestPlant:
    @given(st.integers(1, 10), st.sampled_from((0.3, 0.5, 0.8)), st.floats(0, 0.2))
    def test_the_fewest_chunks_are_lowered(self, sessions: int, factor: float, more_s: float) -> None:
        plant = Plant(floor_factor=factor)
        lowered = plant.lowered(sessions, more_s)
        fits = [
            n for n in range(sessions + 1) if plant.chunk_s(sessions, n) + more_s <= plant.target_s + 1e-9
        ]
        assert lowered == (fits[0] if fits else sessions)

    def test_k_floor_is_bounded_by_the_floor_and_by_memory(self) -> None:
        assert Plant(floor_factor=0.5).floor_capacity == 10
        assert Plant(floor_factor=0.5, memory_slots=7).floor_capacity == 7
        assert Plant(floor_factor=0.5, memory_slots=2).floor_capacity == 5
        assert Plant().floor_capacity == 5


@given(st.lists(st.tuples(st.floats(0.01, 20), st.floats(0, 50), st.floats(0, 1)), max_size=60))
def test_the_debt_is_the_share_of_the_last_minute(history: list[tuple[float, float, float]]) -> None:
    window, now = DebtWindow(), 0.0
    added: list[tuple[float, float, float]] = []
    for elapsed_s, sessions_s, share in history:
        now += elapsed_s
        window.add(now, sessions_s, sessions_s * share)
        added.append((now, sessions_s, sessions_s * share))
        recent = [one for one in added if int(one[0]) >= now - DEBT_S]
        total, lowered = sum(one[1] for one in recent), sum(one[2] for one in recent)
        assert window.share(now) == pytest.approx(lowered / total if total > 1e-5 else 0.0, abs=1e-4)


class TestRuns:
    def test_a_burst_is_absorbed_and_its_excess_moves_to_new_workers(self) -> None:
        # Ten sessions fill two workers, whose floors carry twenty.
        trace = square(10, 20, 600, 600)
        policy = policy_for(PLANT, quality_debt_limit=LIMIT)
        plain = Simulation(trace, PLANT, Controlled(policy_for(PLANT), flat_table(0.7), 4)).run()
        ours = Simulation(trace, PLANT, Controlled(policy, flat_table(RHO), 4))
        outcome = ours.run()
        assert plain.late_first > 0
        assert (outcome.late_first, outcome.quality_debt > 0) == (0, True)
        assert outcome.cost_s < plain.cost_s
        entries = ours.fleet.cluster.entries.values()
        assert all(entry.held <= entry.slots for entry in entries), "quality returns"

    def test_no_worker_ever_holds_more_than_k_floor(self) -> None:
        plant = replace(PLANT, memory_slots=7)
        simulation = Simulation(square(5, 60, 200, 400), plant, Absorbed(Fixed(4)))
        for second in range(1, 400):
            simulation.advance(float(second))
            assert all(entry.held <= 7 for entry in simulation.fleet.cluster.entries.values())
        assert simulation.run().late_first > 0

    @settings(deadline=None, max_examples=10)
    @given(st.integers(0, 1_000), st.sampled_from((0.4, 0.7, 0.95)), st.booleans())
    def test_without_a_limit_workers_that_could_lower_change_nothing(
        self, seed: int, rho: float, predictive: bool
    ) -> None:
        trace = square(5, 25, 60, 240, seed)
        runs = [
            Simulation(trace, plant, Controlled(policy_for(plant), flat_table(rho, predictive=predictive), 2))
            for plant in (PLANT, replace(PLANT, floor_factor=1.0))
        ]
        one, other = (run.run() for run in runs)
        assert one == other
        assert one.lowered_s == 0.0


class TestFiles:
    def requests(self, tmp_path: Path, header: str, rows: list[str]) -> Path:
        path = tmp_path / "requests.csv"
        path.write_text("\n".join([header, *rows]) + "\n")
        return path

    def test_requests_become_sessions(self, tmp_path: Path) -> None:
        rows = [f"{n * 0.5},{1 + n % 7}" for n in range(2_000)]
        trace = read_any(self.requests(tmp_path, "time_s,generated_tokens", rows))
        assert trace.ends_s == pytest.approx(999.5 - 2 * STAY_S)
        active = trace.active()
        assert 25 < sum(active) / len(active) < 100
        azure = [f"2023-11-16 18:{n // 60:02}:{n % 60:02}.6805900,10,{1 + n % 7}" for n in range(1_000)]
        header = "TIMESTAMP,ContextTokens,GeneratedTokens"
        assert read_any(self.requests(tmp_path, header, azure)).ends_s == pytest.approx(999 - 2 * STAY_S)

    def test_a_trace_of_the_products_form_is_read_as_it_is(self, tmp_path: Path) -> None:
        path = self.requests(tmp_path, "time_s,session,event", ["1,a,arrival", "5,a,departure"])
        assert [step.at for step in read_any(path).steps] == [1.0, 5.0]

    @pytest.mark.parametrize(
        ("header", "row", "field"),
        [
            ("time_s,generated_tokens", "soon,5", "requests.csv[0].time_s"),
            ("time_s,generated_tokens", "nan,5", "requests.csv[0].time_s"),
            ("time_s,generated_tokens", "1,many", "requests.csv[0].generated_tokens"),
            ("TIMESTAMP,GeneratedTokens", "yesterday,5", "requests.csv[0].TIMESTAMP"),
            ("time_s,generated_tokens", "1,5", "requests.csv"),
            ("when,what", "1,5", "requests.csv"),
        ],
    )
    def test_a_bad_row_is_named(self, tmp_path: Path, header: str, row: str, field: str) -> None:
        with pytest.raises(InvalidInputError) as caught:
            read_any(self.requests(tmp_path, header, [row]))
        assert caught.value.field == field


@pytest.mark.parametrize("second", ["b/x.csv", "c/x.txt", "b/bursty 100.csv"])
def test_traces_of_equal_names_are_refused(tmp_path: Path, second: str) -> None:
    """Results are kept by name: the second would have replaced the first."""
    paths = [tmp_path / "a" / "x.csv", tmp_path / second]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text("time_s,session,event\n1.0,ses_a,arrival\n9.0,ses_a,departure\n")
    name, other = paths[1].stem, paths[0] if paths[1].stem == "x" else "one of the benchmark's own traces"
    with pytest.raises(BenchError) as caught:
        command.run(only="absorption", trace=paths)
    assert str(caught.value) == (
        f"--trace: {name}: {paths[1]} would have the same name as {other} in the results; rename the file"
    )


def test_the_hull_is_the_best_mixture_of_two_runs() -> None:
    points = [Point(100, 40), Point(130, 22), Point(160, 20), Point(210, 3), Point(260, 0)]
    front = Front(points)
    for cost_s in range(100, 261, 10):
        mixtures = [
            one.late + (cost_s - one.cost_s) / (other.cost_s - one.cost_s) * (other.late - one.late)
            for one, other in combinations_with_replacement(points, 2)
            if one.cost_s <= cost_s <= other.cost_s and one != other
        ]
        assert front.late_at(cost_s) == pytest.approx(min(mixtures))
