"""`turboserve bench paper`: its metrics, its bounds, its kept results, and the reports of its experiments."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.autoscaler.control.events import SessionChange
from turboserve.bench.report import BenchError
from turboserve.experiments.autoscale.appendix import other_windows
from turboserve.experiments.autoscale.bursts import GENERATORS
from turboserve.experiments.autoscale.keeping import replay
from turboserve.experiments.autoscale.oracles import cheapest_cost, cheapest_plan, lower_bound
from turboserve.experiments.autoscale.outcome import ScalingOutcome
from turboserve.experiments.autoscale.plant import Plant, policy_for
from turboserve.experiments.autoscale.shapes import constant, from_counts
from turboserve.experiments.autoscale.sizers import flat_table
from turboserve.experiments.autoscale.trace import Step, checked
from turboserve.experiments.paper import command, figure9, table2, table3, table5_6, table7_10
from turboserve.experiments.paper.command import EXPERIMENTS, run, table
from turboserve.experiments.paper.experiment import Scale
from turboserve.experiments.paper.metrics import (
    Curve,
    Setting,
    above_percent,
    as_json,
    mean_interval,
    measure,
    reduction_percent,
    run_metrics,
)
from turboserve.experiments.paper.profiles import MODELS, SESSIONS, USUAL, cluster
from turboserve.experiments.result_folder import PaperCell, ResultFolder

QUICK = Scale(quick=True, draws=1)
KEYS = {"paper", "ours", "interval", "ratio", "wanted", "met", "declared"}


class TestMetrics:
    def test_a_run_is_measured_once(self) -> None:
        outcome = ScalingOutcome(
            cost_s=10.0, session_s=4.0, latency_sum=2.0, worst_s=3.0, worst_served_s=0.5, placed=8, late=2
        )
        found = measure(outcome)
        assert (found.mean_ms, found.served_ms, found.with_waits_ms) == (500, 500, 3000)
        assert (found.cost_worker_s, found.late_percent) == (10, 25)
        assert measure(outcome, 7.0).cost_worker_s == 7
        assert run_metrics(as_json(found)) == found

    def test_differences_are_relative_to_the_reference(self) -> None:
        assert above_percent(110, 100) == pytest.approx(10)
        assert reduction_percent(62.5, 100) == pytest.approx(37.5)

    def test_an_interval_needs_two_draws(self) -> None:
        assert mean_interval([3.0])["ci95"] is None
        found = mean_interval([1.0, 2.0, 3.0])
        assert (found["mean"], found["min"], found["max"], found["draws"]) == (2, 1, 3, 3)
        # Student's quantile for 2 degrees of freedom, over the square root of 3.
        assert found["ci95"] == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)

    def test_a_curve_is_read_at_equal_cost_and_at_equal_latency(self) -> None:
        curve = Curve(
            [Setting("a", 100, 50), Setting("b", 80, 90), Setting("c", 120, 50), Setting("d", 90, 95)]
        )
        at_cost, at_latency = curve.at_cost(99), curve.at_latency(60)
        assert at_cost is not None
        assert at_latency is not None
        assert (at_cost.name, at_latency.name) == ("b", "a")
        assert curve.at_cost(79) is None
        assert curve.at_latency(49) is None


class TestBounds:
    @settings(deadline=None)
    @given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.floats(0, 200))
    def test_slots_cost_what_their_plan_costs(self, needs: list[int], start_up_s: float) -> None:
        _, cost_s = cheapest_plan(needs, 60.0, start_up_s)
        slots = [(60.0 * index, need) for index, need in enumerate(needs)]
        assert cheapest_cost(slots, 60.0 * len(needs), start_up_s) == pytest.approx(cost_s)

    def test_a_gap_costs_no_more_than_a_start(self) -> None:
        needs = [(0.0, 2), (10.0, 1), (13.0, 2), (20.0, 1), (90.0, 3)]
        # The second worker stays for 3 s, then starts again; the third starts once.
        assert cheapest_cost(needs, 100.0, 5.0) == 100 + (10 + 3 + 7) + 5 + 10 + (5 + 10)

    def test_a_constant_load_costs_its_workers(self) -> None:
        plant = Plant()
        wait_s = plant.target_s - plant.latency_s[1]
        # Workers that are there from the start are cheaper than a start-up.
        assert lower_bound(constant(12, 100), plant) == pytest.approx(300)
        at_once = replace(plant, start_up_s=0.0)
        assert lower_bound(constant(12, 100), at_once) == pytest.approx(3 * (100 - wait_s))

    def test_who_leaves_within_the_wait_needs_no_slot(self) -> None:
        steps = [Step(1.0, "a", SessionChange.ARRIVAL), Step(1.5, "a", SessionChange.DEPARTURE)]
        assert lower_bound(checked("short", steps, 10.0), Plant()) == 0

    @settings(deadline=None, max_examples=15)
    @given(st.lists(st.integers(0, 40), min_size=5, max_size=60), st.integers(0, 5), st.floats(0.3, 0.95))
    def test_no_run_in_time_costs_less(self, counts: list[int], seed: int, rho: float) -> None:
        trace, plant = from_counts("random", counts, seed), Plant(start_up_s=3.0)
        outcome = replay(trace, plant, policy_for(plant), flat_table(rho))
        if outcome.late_first == 0:
            assert outcome.cost_s >= lower_bound(trace, plant) - 1e-6


def test_the_declared_plants_have_the_published_chunks() -> None:
    for name, model in MODELS.items():
        plant = cluster(name)
        assert plant.latency_s[USUAL] == pytest.approx(model.chunk_s)
        assert plant.latency_s[SESSIONS] + plant.migration_s < plant.target_s
        assert all(b > a for a, b in pairwise(plant.latency_s.values()))


def counted(folder: str, value: int) -> dict[str, int]:
    """Leave a file for each call, and return the value."""
    calls = Path(folder)
    calls.mkdir(exist_ok=True)
    (calls / f"{value}.{len(list(calls.iterdir()))}").touch()
    return {"value": value}


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    cells = [PaperCell("x", f"cell {value}", counted, (str(calls), value)) for value in range(3)]
    seen: list[str] = []
    first = ResultFolder(tmp_path / "kept").run(cells[:2], 1, seen.append)
    again = ResultFolder(tmp_path / "kept").run(cells, 1, seen.append)
    assert first == {cell: {"value": value} for value, cell in enumerate(cells[:2])}
    assert again == {cell: {"value": value} for value, cell in enumerate(cells)}
    assert len(list(calls.iterdir())) == 3
    assert len(seen) == 5
    assert len({cell.digest for cell in cells}) == 3


def test_results_that_depend_on_the_machine_are_not_kept(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    cell = PaperCell("x", "time", counted, (str(calls), 0), kept=False)
    for number in (1, 2):
        found = ResultFolder(tmp_path / "kept").run([cell], 1, lambda title: None)
        assert found == {cell: {"value": 0}}
        assert len(list(calls.iterdir())) == number
    assert not list((tmp_path / "kept").iterdir())
    times = [cell for cell in figure9.cells(QUICK) if cell.function is figure9.run_times]
    assert times
    assert not any(cell.kept for cell in times)


def test_a_failing_report_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        NAME = "table2"

        def cells(self, scale: Scale) -> list[PaperCell]:
            return [PaperCell("table2", "one", _seven)]

        def report(self, scale: Scale, results: object) -> dict[str, object]:
            raise ZeroDivisionError("no draws")

    class Reporting(Failing):
        NAME = "table3"

        def report(self, scale: Scale, results: object) -> dict[str, object]:
            return {"ours": 1}

        def rows(self, report_: object) -> list[tuple[str, str, str]]:
            return [("what", "paper", "ours")]

    monkeypatch.setattr(command, "EXPERIMENTS", {"table2": Failing(), "table3": Reporting()})
    found = run()
    failed, reported = found["experiments"]["table2"], found["experiments"]["table3"]
    assert failed["error"] == "ZeroDivisionError: no draws"
    assert "in report" in failed["traceback"]
    assert failed["cells"] == {"one": 7}
    assert reported == {"ours": 1, "cells": {"one": 7}}
    assert table(found).row_count == 2


def _seven() -> int:
    return 7


def test_an_unknown_experiment_is_named() -> None:
    with pytest.raises(BenchError, match=r"unknown experiment 'table9'.*table2"):
        run(only="table9")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_draw_of_the_whole_run_is_its_own_cell(name: str) -> None:
    cells = EXPERIMENTS[name].cells(Scale())
    assert len({cell.digest for cell in cells}) == len(cells)
    assert len({cell.key for cell in cells}) == len(cells)
    assert len(Scale().seeds) >= 10
    quick = EXPERIMENTS[name].cells(Scale(quick=True))
    assert 0 < len(quick) < len(cells) / 3


class TestReports:
    def test_table_2(self) -> None:
        # T1 is a quarter of T4, so it stands for it here.
        found = table2.run("T1", 0, 2.0, ("T1",))
        bound, second = found["lower_bound_worker_s"], found["oracle_second_worker_s"]
        assert bound <= second <= found["oracle_minute"]["cost_worker_s"]
        for system in found["systems"].values():
            assert system["cost_worker_s"] > bound
        report = table2.report(QUICK, dict.fromkeys(table2.cells(QUICK), found))
        assert report.keys() == KEYS
        row = report["ours"]["2 s"]["systems"]["reactive"]
        assert row["above_minute_oracle_percent"]["mean"] == pytest.approx(
            found["systems"]["reactive"]["above_minute_oracle_percent"]
        )
        assert report["met"].keys() == report["wanted"].keys()
        assert len(table2.rows(report)) == 2 * len(found["systems"])

    def test_table_3(self) -> None:
        found = table3.run("K = 5", "shipped table", 0, 2.0)
        assert len(found["windows"]) == 6
        assert sum(window["migrations"] for window in found["windows"]) == found["migrations"] > 0
        assert sum(len(window["actions"]) for window in found["windows"]) == found["actions"] > 0
        assert all(0 < window["gpus_at_end"] <= 16 for window in found["windows"])
        report = table3.report(QUICK, dict.fromkeys(table3.cells(QUICK), found))
        assert report.keys() == KEYS
        assert len(table3.rows(report)) == 16

    def test_tables_5_and_6(self) -> None:
        level = table5_6.run_level(1, 7, 0, 2.0)
        assert level["pass_rate"] == 1
        whole = {"late": 1, "activations": 4, "late_percent": 25.0, "target_utilizations": [0.5] * 10}
        cells = table5_6.cells(QUICK)
        results = {cell: whole if cell.function is table5_6.run_table else level for cell in cells}
        report = table5_6.report(QUICK, results)
        assert report.keys() == KEYS
        cost = level["cost_worker_s"]
        assert report["ratio"]["cost"][0] == pytest.approx(cost / 338.66, abs=1e-4)
        assert report["met"] == {"cost_ratio_at_any_level": cost < 338, "whole_table_late_percent": False}
        assert len(table5_6.rows(report)) == 22

    def test_tables_7_to_10(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Two choices a window instead of fifteen, and a table that is not profiled first.
        monkeypatch.setattr(table7_10, "windowed_oracle", _small_oracle)
        monkeypatch.setattr(table7_10, "_table", lambda training, start_up_s: flat_table(0.66))
        found = table7_10.run(table7_10.PUBLISHED, 0, 1, 2.0)
        oracle = found["oracle"]
        assert found["lower_bound_worker_s"] < oracle["cost_worker_s"]
        assert len(oracle["gpus_at_window_end"]) == len(oracle["targets"]) == 10
        assert oracle["served_ms"] == pytest.approx(668)
        report = table7_10.report(QUICK, dict.fromkeys(table7_10.cells(QUICK), found))
        assert report.keys() == KEYS
        assert report["ratio"]["oracle_cost"] == pytest.approx(oracle["cost_worker_s"] / 3695, abs=1e-4)
        assert len(table7_10.rows(report)) == 16
        assert {row["learned"]["traces"] for row in report["ours"]["2 s"][table7_10.OTHERS].values()} == {
            1,
            5,
        }
        default = found["systems"][table7_10.HEADLINE]
        assert default["late"] == 0
        # The oracle with all of its choices costs 3,671.
        assert default["cost_worker_s"] <= 1.005 * 3671

    def test_the_terminal_shows_every_row(self) -> None:
        found = table3.run("K = 5", "shipped table", 0, 2.0)
        report = table3.report(QUICK, dict.fromkeys(table3.cells(QUICK), found))
        assert table({"experiments": {"table3": report}}).row_count == 16


def _small_oracle(trace, plant, policy, window_s):  # type: ignore[no-untyped-def]
    from turboserve.experiments.autoscale.oracles import windowed_oracle

    return windowed_oracle(trace, plant, policy, window_s, (0.55, 0.8))


def test_unseen_windows_are_not_those_that_are_profiled() -> None:
    seen = {other_windows(seed).digest for seed in range(table7_10.TRAINING)}
    unseen = {other_windows(table7_10.FIRST_UNSEEN + seed).digest for seed in Scale().seeds}
    assert len(seen | unseen) == len(seen) + len(unseen)


def test_twenty_traces_of_other_generators_are_replayed() -> None:
    others = [cell.arguments for cell in table7_10.cells(Scale()) if cell.arguments[0] in GENERATORS]
    assert len(others) == len(set(others)) == 20
