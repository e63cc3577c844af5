"""`turboserve bench slack` on small runs of the simulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turboserve.bench.report import BenchError
from turboserve.experiments.slack import cell_store, cells, command
from turboserve.experiments.slack.cell_store import CellStore
from turboserve.experiments.slack.cells import Cell, CellResult, CprBounds, simulate, simulate_bounds
from turboserve.experiments.slack.load import LoadSearch
from turboserve.experiments.slack.metrics import StreamMetrics, measure
from turboserve.experiments.slack.policies import ABLATIONS, MAIN, POLICIES, QUICK, SIDE, SWEEP, SlackPolicy
from turboserve.experiments.slack.workloads import WORKLOADS, steady
from turboserve.simulation.streams import StreamRecord

SMALL = Cell("paper", "steady", "sdv2", workers=2, streams=6, rate=0.5, seed=1)


def test_each_stream_gets_all_its_chunks_and_no_more() -> None:
    found = simulate(SMALL)
    assert found.violations == 0, found.messages
    assert found.metrics.incomplete == 0
    assert 0.0 < found.metrics.cpr <= 1.0
    # A chunk takes 1 s, so a lone stream's first chunk comes no earlier.
    assert 1.0 <= found.metrics.ttfc_mean_s < 5.0
    assert simulate(SMALL) == found


def test_a_lone_stream_is_as_late_as_arithmetic_demands() -> None:
    # Chunk i is ready after i + 1 seconds and due after 4 s and 0.75 s a chunk, the first having 9 frames.
    # A stall shifts the rest, so that every later chunk is late, too.
    [plan] = steady(2, 1, 0.5, 2)
    found = simulate(replace(SMALL, streams=1, seed=2)).metrics
    # It does not wait for the next chunk's first forward, of 0.2 s.
    assert 1.0 <= found.ttfc_mean_s < 1.1
    late = sum(found.ttfc_mean_s + i > 4 + 9 / 16 + 0.75 * (i - 1) for i in range(1, plan.chunks))
    assert found.cpr == pytest.approx(1 - late / plan.chunks)
    assert plan.chunks > 11
    assert late > 0


def test_the_first_chunk_of_ours_is_made_at_the_floor_and_the_rest_is_not() -> None:
    found = simulate(Cell("graded", "steady", "ours", workers=2, streams=1, rate=0.5, seed=1)).metrics
    # Three forwards of 0.2 s, then the best configuration of five.
    assert 0.6 <= found.ttfc_mean_s < 0.7
    assert found.least_quality == pytest.approx(0.985)
    assert found.quality > 0.99
    assert found.cpr == 1.0


def test_viewers_that_switch_get_all_chunks_and_discard_some(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StreamRecord] = []

    def measured(records: Sequence[StreamRecord], lasted_s: float) -> StreamMetrics:
        seen.extend(records)
        return measure(records, lasted_s)

    monkeypatch.setattr(cells, "measure", measured)
    found = simulate(replace(SMALL, workload="switch", policy="credit_only", streams=4))
    assert (found.violations, found.metrics.incomplete) == (0, 0), found.messages
    for record in seen:
        skips = [chunk.ready_s for chunk in record.received if chunk.skips]
        # A switch after the last chunk was generated changes nothing.
        assert len(record.switched) - 1 <= len(skips) <= len(record.switched)
        assert all(skip > at for skip, at in zip(skips, record.switched, strict=False))
    assert sum(len(record.switched) for record in seen) > 2


def test_finished_cells_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(SMALL, streams=2)
    first = CellStore(tmp_path).run([cell])
    monkeypatch.setattr(cells, "simulate", lambda cell: pytest.fail("it ran again"))
    assert CellStore(tmp_path).run([cell]) == first
    cpr = first[cell].metrics.cpr
    assert CellStore(tmp_path).bounds(cell, 0.1, 0.9) == CprBounds(cpr, cpr)
    monkeypatch.setattr(cell_store, "source_digest", lambda: "of other code")
    with pytest.raises(pytest.fail.Exception, match="it ran again"):
        CellStore(tmp_path).run([cell])


def test_a_run_ends_when_its_answer_is_certain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = replace(SMALL, rate=4.0, streams=5)
    whole = simulate(cell).metrics.cpr
    assert simulate_bounds(cell, 0.0, 2.0) == CprBounds(whole, whole)
    low, high = simulate_bounds(cell, whole + 0.2, 2.0), simulate_bounds(cell, 0.0, whole - 0.2)
    assert low.least <= whole <= low.most < whole + 0.2
    assert low.least < low.most
    assert whole - 0.2 <= high.least <= whole <= high.most
    # Bounds are kept, too, and computed anew for a question that they do not answer.
    first = CellStore(tmp_path).bounds(cell, whole + 0.2, 2.0)
    runs: list[tuple[float, float]] = []

    def ended(cell: Cell, too_low: float, enough: float) -> CprBounds:
        runs.append((too_low, enough))
        return CprBounds(whole, whole)

    monkeypatch.setattr(cells, "simulate_bounds", ended)
    store = CellStore(tmp_path)
    assert store.bounds(cell, whole + 0.2, 2.0) == first
    assert runs == []
    store.bounds(cell, whole + 0.01, 2.0)
    store.bounds(cell, whole - 0.1, whole)
    assert runs == [(whole + 0.01, 2.0)]


@pytest.mark.parametrize("seed", range(20))
def test_early_ends_change_no_answer(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 5)
    cpr = {number: chance.choice((0.0, 0.9, 0.95, 1.0, chance.random())) for number in range(count)}

    def bounds(cell: Cell, too_low: float, enough: float) -> CprBounds:
        """As wide as the question permits."""
        whole = cpr[cell.seed]
        if whole < too_low and chance.random() < 0.7:
            return CprBounds(chance.uniform(0.0, whole), chance.uniform(whole, min(1.0, too_low) - 1e-6))
        if whole >= enough and chance.random() < 0.7:
            return CprBounds(chance.uniform(max(0.0, enough), whole), chance.uniform(whole, 1.0))
        return CprBounds(whole, whole)

    wanted = chance.uniform(0.5, 1.0)
    search = LoadSearch(bounds, list(cpr), wanted, 5)
    assert search.reaches(SMALL) == (sum(cpr.values()) / count >= wanted)


@pytest.mark.parametrize(
    "policy",
    [
        "ts_chunk",
        "slackserve",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("ts", "slackserve_alpha_4")),
    ],
)
def test_workers_of_one_host_lend_each_other_their_devices(policy: str) -> None:
    # Two long streams, each on a worker of its own that takes longer for a chunk than the chunk plays, and a
    # worker without any.
    found = simulate(Cell("paper", "steady", policy, workers=3, streams=2, rate=2.0, seed=8))
    assert (found.violations, found.metrics.incomplete) == (0, 0), found.messages
    assert found.loans > 0


def test_a_loan_keeps_a_stream_in_time_that_one_worker_cannot() -> None:
    lone = Cell("paper", "steady", "ts_chunk_without_sp", workers=2, streams=1, rate=0.5, seed=2)
    alone = simulate(lone)
    together = simulate(replace(lone, policy="ts_chunk"))
    assert alone.metrics.cpr < 1.0
    assert (together.metrics.cpr, together.metrics.quality) == (1.0, 1.0)
    assert (alone.loans, together.violations) == (0, 0)


@pytest.mark.parametrize(("workload", "profile"), [("trace", "toyworld"), ("burst", "graded")])
def test_other_workloads_and_profiles_run(workload: str, profile: str) -> None:
    found = simulate(replace(SMALL, workload=workload, profile=profile, policy="ours", streams=4))
    assert (found.violations, found.metrics.incomplete) == (0, 0), found.messages


def test_one_command_runs_all_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[Cell] = []

    def result(cell: Cell) -> CellResult:
        """As in time as the policy's place in the comparison and the rate allow."""
        ran.append(cell)
        carried = {"ours": 1.5, "slackserve": 1.0, "ts": 0.7}.get(cell.policy, 0.1)
        cpr = 1.0 if cell.rate <= carried else 0.5
        metrics = StreamMetrics(cpr, cpr, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0)
        return CellResult(metrics, 1, 2, 0, 10.0)

    def bounds(cell: Cell, too_low: float, enough: float) -> CprBounds:
        cpr = result(cell).metrics.cpr
        return CprBounds(cpr, cpr)

    monkeypatch.setattr(cells, "simulate", result)
    monkeypatch.setattr(cells, "simulate_bounds", bounds)
    monkeypatch.setattr(command, "decision_times", lambda *given: {})
    found = command.run(seeds=2, cells=tmp_path, jobs=1)
    assert set(found["workloads"]) == set(WORKLOADS)
    assert set(found["workloads_64_workers"]) == {"steady", "burst"}
    assert set(found["workloads"]["switch"]) == set(MAIN)
    assert set(found["rates"]) == {"0.6", "1", "1.4", "1.8", "2.2"}
    assert set(found["profiles"]) == {"paper", "graded", "toyworld"}
    assert (list(found["ablations"]), list(found["alpha"])) == (list(ABLATIONS), list(SWEEP))
    loads = found["load_at_cpr_95"]
    assert loads["ours"] == pytest.approx(1.5, abs=0.08)
    assert loads["sdv2"] is None
    assert found["load_ratio"]["static"] == pytest.approx(1.5 / 0.7, rel=0.15)
    assert found["workloads"]["steady"]["slackserve"]["sp_events"] == 2
    assert found["not_built"] == {}
    count = len(ran)
    assert count == len(set(ran))
    command.run(seeds=2, cells=tmp_path, jobs=1)
    assert len(ran) == count
    assert command.table(found).row_count > 100
    quick = command.run(quick=True, jobs=1)
    assert set(quick) == set(found)
    assert set(quick["workloads"]["trace"]) == set(QUICK)
    assert set(quick["load_at_cpr_95"]) == set(quick["rates"]["0.6"]) == set(SIDE)
    assert len(ran) - count < 200


def test_the_command_reports_its_rows() -> None:
    found = command.run(
        quick=True,
        only="workloads",
        policies="sdv2",
        workloads="steady",
        seeds=2,
        streams=4,
        rate=1.0,
        jobs=1,
    )
    row = found["workloads"]["steady"]["sdv2"]
    assert 0.0 < row["cpr"] <= 1.0
    assert (row["violations"], row["sp_events"]) == (0, 0)
    assert command.table(found).row_count == 1


def test_a_row_whose_setting_does_not_exist_is_not_built() -> None:
    assert SlackPolicy("", "fcfs", "least-loaded", {"no_such": 1}).not_built == "setting no_such"
    assert SlackPolicy("", "no-such", "least-loaded").not_built == "gather policy no-such"
    assert POLICIES["sdv2"].not_built is None


@pytest.mark.parametrize("option", ["only", "policies", "workloads", "profile"])
def test_an_unknown_name_is_refused(option: str) -> None:
    options: dict[str, Any] = {option: "no-such"}
    with pytest.raises(BenchError, match=f"--{option}: .*no-such.* known: "):
        command.run(**options)
