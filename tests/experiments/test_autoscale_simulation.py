"""The autoscaler's simulator: its traces, its fleet, its oracles, its profiling."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from turboserve.autoscaler.control.events import SessionChange
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.cli.main import app
from turboserve.contracts.autoscale import ProfileTable, Provenance
from turboserve.contracts.errors import InvalidInputError
from turboserve.experiments.autoscale.agreement import agreement
from turboserve.experiments.autoscale.appendix import WINDOWS, calm, segment, ten_windows
from turboserve.experiments.autoscale.command import Unit, run_all
from turboserve.experiments.autoscale.oracles import cheapest_plan, slot_needs, windowed_oracle
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.production import azure
from turboserve.experiments.autoscale.profiling import (
    Grid,
    Segment,
    build_table,
    search,
    split_trace,
    volatility,
    whole,
)
from turboserve.experiments.autoscale.replay import Parameters, Replays
from turboserve.experiments.autoscale.shapes import constant, from_counts, square
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, Fixed, Planned, flat_table
from turboserve.experiments.autoscale.trace import Step, WorkloadTrace, checked, read, since, write

POLICY = ControlPolicy(most=16, capacity=5)


def fresh() -> Replays:
    return Replays(Plant(), POLICY)


class TestTraces:
    @pytest.mark.parametrize(
        ("rows", "field"),
        [
            (["5,a,arrival", "4,b,arrival"], "t.csv[1].time_s"),
            (["-1,a,arrival"], "t.csv[0].time_s"),
            (["nan,a,arrival"], "t.csv[0].time_s"),
            (["inf,a,arrival"], "t.csv[0].time_s"),
            # A wall-clock time: a replay of it would never end.
            (["1700000000,a,arrival"], "t.csv[0].time_s"),
            (["soon,a,arrival"], "t.csv[0].time_s"),
            (["1,a,departure"], "t.csv[0].event"),
            (["1,a,arrival", "2,a,arrival"], "t.csv[1].event"),
            (["1,a,eats"], "t.csv[0].event"),
            (["1,a b,arrival"], "t.csv[0].session"),
            ([], "t.csv"),
        ],
    )
    def test_bad_rows_are_named(self, tmp_path: Path, rows: list[str], field: str) -> None:
        path = tmp_path / "t.csv"
        path.write_text("\n".join(["time_s,session,event", *rows]))
        with pytest.raises(InvalidInputError) as caught:
            read(path)
        assert caught.value.field == field

    def test_a_file_without_the_columns_or_none_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("a,b\n1,2\n")
        for name in ("t.csv", "missing.csv"):
            with pytest.raises(InvalidInputError) as caught:
                read(tmp_path / name)
            assert caught.value.field == name

    def test_what_is_written_can_be_read(self, tmp_path: Path) -> None:
        trace = segment(11, 0)
        write(trace, tmp_path / "t.csv")
        again = read(tmp_path / "t.csv")
        assert len(again.steps) == len(trace.steps)
        assert again.peak == trace.peak == 27

    def test_a_piece_begins_with_who_is_active(self) -> None:
        steps = [
            Step(0, "a", SessionChange.ARRIVAL),
            Step(1, "b", SessionChange.ARRIVAL),
            Step(2, "b", SessionChange.IDLING),
            Step(3, "c", SessionChange.ARRIVAL),
            Step(4, "c", SessionChange.DEPARTURE),
            Step(6, "b", SessionChange.ACTIVATION),
            Step(7, "a", SessionChange.DEPARTURE),
            Step(9, "b", SessionChange.DEPARTURE),
        ]
        piece = checked("piece", since(steps, 5.0, 8.0), 3.0)
        assert [(step.at, step.session, step.kind.value) for step in piece.steps] == [
            (0.0, "a", "arrival"),
            (1.0, "b", "arrival"),
            (2.0, "a", "departure"),
        ]

    def test_the_ten_windows_are_those_of_the_table(self) -> None:
        counts = ten_windows().active()
        for window, (total, top) in enumerate(WINDOWS):
            part = counts[30 * window : 30 * window + 30]
            assert (sum(part), max(part)) == (total, top)

    def test_real_arrivals_begin_with_a_full_system(self) -> None:
        trace = azure(1, 300.0)
        assert 25 < trace.active()[0] < 100


class TestFleet:
    def test_a_fixed_pool_costs_its_size(self) -> None:
        outcome = Simulation(constant(12, 100), Plant(), Fixed(4)).run()
        assert outcome.cost_s == pytest.approx(400)
        assert outcome.mean_s == pytest.approx(3 * 0.1336)
        assert outcome.worst_s == pytest.approx(3 * 0.1336)
        assert outcome.passes

    def test_who_finds_no_slot_waits_and_is_late(self) -> None:
        trace = checked(
            "two", [Step(0, "a", SessionChange.ARRIVAL), Step(1, "b", SessionChange.ARRIVAL),
                    Step(4, "a", SessionChange.DEPARTURE)], 10.0)  # fmt: skip
        plant = Plant(capacity=1, latency_s={1: 0.1336})
        outcome = Simulation(trace, plant, Fixed(1)).run()
        assert (outcome.waited, outcome.late) == (1, 1)
        assert outcome.wait_s == pytest.approx(3)
        assert outcome.worst_s == pytest.approx(3.1336)

    def test_the_cost_of_a_part_of_a_run_is_its_share(self) -> None:
        outcome = Simulation(constant(1, 100), Plant(), Planned([1, 2], 50.0, 10.0)).run()
        parts = [outcome.cost_between(at, at + 20.0) for at in range(0, 100, 20)]
        assert sum(parts) == pytest.approx(outcome.cost_s)
        assert parts[0] == pytest.approx(20)
        assert parts[-1] == pytest.approx(40)

    def test_a_started_worker_costs_before_it_serves(self) -> None:
        outcome = Simulation(constant(1, 100), Plant(), Planned([1, 2], 50.0, 10.0)).run()
        assert outcome.cost_s == pytest.approx(100 + 60, abs=1.1)

    def test_a_drained_worker_goes_when_its_sessions_have_migrated(self) -> None:
        outcome = Simulation(constant(4, 100), Plant(), Planned([4, 1], 50.0, 0.0)).run()
        assert outcome.migrations == 3
        assert outcome.cost_s == pytest.approx(4 * 50 + 50, abs=4.0)
        assert outcome.late == 0

    @given(st.lists(st.integers(0, 40), min_size=5, max_size=40), st.integers(0, 5))
    @settings(max_examples=20, deadline=None)
    def test_no_worker_is_overfilled_and_the_same_run_is_the_same(self, counts: list[int], seed: int) -> None:
        trace = from_counts("random", counts, seed)
        runs = [Simulation(trace, Plant(), Controlled(POLICY, flat_table(0.6), 2)).run() for _ in range(2)]
        assert runs[0].worst_served_s <= 5 * 0.1336 + 1e-9
        assert runs[0] == runs[1]
        executed = runs[0].session_s + runs[0].wait_s
        changes = sum(trace.active()) if len(set(counts)) == 1 else executed
        assert executed == pytest.approx(changes)

    def test_a_fork_goes_on_as_the_run_itself_would(self) -> None:
        run = Simulation(ten_windows(), Plant(), Controlled(POLICY, flat_table(0.7), 6))
        run.advance(60.0)
        fork = run.fork()
        assert fork.run() == run.run()

    def test_the_whole_scheduler_core_decides_the_same(self) -> None:
        trace = ten_windows()
        for workers in (8, 16):
            found = agreement(trace, workers, Plant())
            assert found["share"] == 1.0
            found = agreement(trace, workers, Plant(floor_factor=0.5, memory_slots=7), absorbs=True)
            assert found["share"] == 1.0, found


class TestOracles:
    @given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.floats(0, 200))
    @settings(max_examples=60, deadline=None)
    def test_the_plan_is_the_cheapest(self, needs: list[int], start_up_s: float) -> None:
        plan, cost_s = cheapest_plan(needs, 60.0, start_up_s)

        def cost(sizes: list[int]) -> float:
            starts = sum(max(b - a, 0) for a, b in pairwise(sizes))
            return 60.0 * sum(sizes) + start_up_s * starts

        def best(index: int, before: int | None) -> float:
            if index == len(needs):
                return 0.0
            return min(
                60.0 * size
                + (start_up_s * max(size - before, 0) if before is not None else 0.0)
                + best(index + 1, size)
                for size in range(needs[index], max(needs) + 1)
            )

        assert all(size >= need for size, need in zip(plan, needs, strict=True))
        assert cost(plan) == pytest.approx(cost_s)
        if len(needs) <= 5:
            assert cost_s == pytest.approx(best(0, None))

    def test_needs_hold_each_slots_peak(self) -> None:
        trace = square(4, 16, 120, 240)
        assert slot_needs(trace, 5, 0.8, 60.0, 16)[1:] == [4, 4, 4]
        assert slot_needs(constant(9, 120), 5, 0.9, 60.0, 16) == [2, 2]

    def test_the_windowed_oracle_is_no_dearer_than_any_fixed_target(self) -> None:
        trace = WorkloadTrace("short", tuple(s for s in ten_windows().steps if s.at < 60), 60.0)
        plant = Plant(start_up_s=2.0)
        grid = (0.5, 0.7, 0.9)
        oracle = windowed_oracle(trace, plant, POLICY, 30.0, grid)
        assert oracle is not None
        assert oracle.outcome.passes
        for rho in grid:
            size = math.ceil(trace.active()[0] / (5 * rho))
            run = Simulation(trace, plant, Controlled(POLICY, flat_table(rho), size)).run()
            if run.passes:
                assert oracle.outcome.cost_s <= run.cost_s + 1e-6

    def test_the_windowed_oracle_says_when_nothing_is_good_enough(self) -> None:
        trace = checked("burst", [Step(1.0, f"s{i}", SessionChange.ARRIVAL) for i in range(99)], 30.0)
        assert windowed_oracle(trace, Plant(), POLICY, 30.0, (0.9,)) is None


class TestProfiling:
    def test_volatility_grows_with_the_burst(self) -> None:
        found = [volatility(segment(burst, 0), POLICY) for burst in (7, 23, 43)]
        assert found == sorted(found)
        assert found[0] == pytest.approx(0.88, abs=0.02)

    def test_the_search_finds_headroom_for_the_burst(self) -> None:
        def profiled(burst: int) -> float:
            found = search([whole(segment(burst, 0), POLICY)], fresh(), Grid((0.25, 0.5, 0.8), (0.2,)))
            assert found.pass_rate == 1.0
            return found.parameters.rho

        assert profiled(43) < profiled(7)

    def test_calm_traffic_is_packed_more_densely_than_any_burst(self) -> None:
        trace = calm(32, 0)
        assert volatility(trace, POLICY) < volatility(segment(7, 0), POLICY)
        found = search([whole(trace, POLICY)], fresh(), Grid((0.5, 0.6, 0.75), (0.2,), (False,)))
        assert (found.pass_rate, found.parameters.rho) == (1.0, 0.75)

    def test_where_nothing_passes_the_safest_is_taken(self) -> None:
        trace = from_counts("flood", [5] * 20 + [75] * 20, 0)
        found = search([Segment(trace, 9.0)], fresh(), Grid((0.25, 0.5, 0.95), (0.2,), (False,)))
        assert found.pass_rate == 0
        assert found.parameters.rho == 0.25

    @pytest.mark.parametrize("shape", ["flat", "ramp"])
    def test_the_forecast_is_on_only_where_it_beats_the_reactive_controller(self, shape: str) -> None:
        counts = [20] * 90 if shape == "flat" else [10 + second // 2 for second in range(90)]
        segments, replays = [whole(from_counts(shape, counts, 0), POLICY)], fresh()
        both = search(segments, replays, Grid((0.9,), (0.2,)))
        alone = search(segments, replays, Grid((0.9,), (0.2,), (False,)))
        assert both.parameters.predictive is (shape == "ramp")
        assert (-both.pass_rate, both.late, both.cost_s) <= (-alone.pass_rate, alone.late, alone.cost_s)
        if both.parameters.predictive:
            assert (both.late, both.cost_s) < (alone.late, alone.cost_s)

    def test_the_search_finds_what_trying_all_of_the_grid_finds(self) -> None:
        """The search gives up early on parameters that cannot win."""
        segments, replays = [whole(segment(burst, 0), POLICY) for burst in (7, 19)], fresh()
        grid = Grid((0.4, 0.5, 0.6, 0.7), (0.2,))

        def cost(its: Parameters) -> tuple[float, ...]:
            shares = [replays.share(s.trace, s.length_s, s.piece, its) for s in segments]
            return (sum(share.late > 0 for share in shares), sum(share.late for share in shares),
                    round(sum(share.cost_s for share in shares), 6), its.predictive, its.rho)  # fmt: skip

        assert search(segments, replays, grid).parameters == min(grid, key=cost)

    def test_pieces_are_played_with_what_was_before_them(self) -> None:
        pieces = split_trace(constant(8, 180), 60.0, POLICY)
        assert [piece.piece for piece in pieces] == [0, 1, 2]
        replays = fresh()
        shares = [replays.share(p.trace, p.length_s, p.piece, Parameters(0.8)) for p in pieces]
        assert [share.cost_s for share in shares] == pytest.approx([120.0] * 3)
        run = Simulation(pieces[0].trace, Plant(), Controlled(POLICY, flat_table(0.8), 2)).run()
        assert sum(share.cost_s for share in shares) == pytest.approx(run.cost_s)

    def test_levels_without_segments_take_the_next_higher_ones(self) -> None:
        pieces = [Segment(segment(burst, 0), float(at)) for at, burst in ((0, 7), (9, 43))]
        table = build_table(
            pieces, 3, Plant(), POLICY, Provenance(source="x"), Grid((0.25, 0.65), (0.2,), (False,))
        )
        assert [row.segments for row in table.levels] == [1, 0, 1]
        assert table.levels[1].target_utilization == table.levels[2].target_utilization
        assert table.provenance.controller == POLICY.dynamics

    def test_nothing_cannot_be_profiled(self) -> None:
        with pytest.raises(InvalidInputError):
            build_table([], 3, Plant(), POLICY, Provenance(source="x"))


class TestCommand:
    def test_units_give_the_same_beside_each_other_as_one_by_one(self) -> None:
        units = [Unit("roots", str(number), math.sqrt, (number,)) for number in (4, 9)]
        assert run_all(units, 2) == run_all(units, 1) == {units[0]: 2.0, units[1]: 3.0}

    def test_an_unknown_case_is_named(self) -> None:
        result = CliRunner().invoke(app, ["bench", "autoscale", "--only", "windows,moon"])
        assert result.exit_code != 0
        assert "moon" in result.output

    def test_a_table_is_made_from_a_trace(self, tmp_path: Path) -> None:
        write(square(4, 8, 40, 80), tmp_path / "t.csv")
        out = tmp_path / "table.json"
        arguments = [
            "--trace",
            str(tmp_path / "t.csv"),
            "--out",
            str(out),
            "--levels",
            "1",
            "--segment",
            "80",
        ]
        result = CliRunner().invoke(app, ["profile", "autoscaler", *arguments])
        assert result.exit_code == 0, result.output
        table = ProfileTable.parse(out.read_bytes())
        assert table.levels[0].segments == 1
        assert "--trace t.csv" in table.provenance.command
        assert table.provenance.late == 0
        assert table.provenance.activations is not None
        assert table.provenance.activations >= 8
        assert "the whole table on the same traces" in result.output
        assert str(tmp_path) not in table.provenance.command

    def test_a_bad_trace_is_refused_by_its_row(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("time_s,session,event\n2,a,arrival\n1,b,arrival\n")
        arguments = ["--trace", str(tmp_path / "t.csv"), "--out", str(tmp_path / "o.json")]
        result = CliRunner().invoke(app, ["profile", "autoscaler", *arguments])
        assert result.exit_code != 0
        assert "t.csv[1].time_s" in result.output
        assert not (tmp_path / "o.json").exists()
