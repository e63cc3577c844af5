"""`turboserve bench slack` on small runs of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turboserve.bench.report import BenchError
from turboserve.experiments.slack import cells, command
from turboserve.experiments.slack.cells import Cell, CellResult, CellStore, simulate
from turboserve.experiments.slack.metrics import StreamMetrics, measure
from turboserve.experiments.slack.policies import ABLATIONS, MAIN, POLICIES, SWEEP, SlackPolicy
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
    first = CellStore(tmp_path).run([SMALL], jobs=1)
    monkeypatch.setattr(cells, "simulate", lambda cell: pytest.fail("it ran again"))
    assert CellStore(tmp_path).run([SMALL], jobs=1) == first
    monkeypatch.setattr(cells, "source_digest", lambda: "of other code")
    with pytest.raises(pytest.fail.Exception, match="it ran again"):
        CellStore(tmp_path).run([SMALL], jobs=1)


@pytest.mark.parametrize("policy", ["ts", "ts_chunk", "slackserve", "slackserve_alpha_4"])
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

    monkeypatch.setattr(cells, "simulate", result)
    monkeypatch.setattr(command, "decision_times", lambda *given: {})
    found = command.run(seeds=2, cells=tmp_path)
    assert set(found["workloads"]) == set(found["workloads_64_workers"]) == set(WORKLOADS)
    assert set(found["workloads"]["switch"]) == set(MAIN)
    assert set(found["rates"]) == {"0.6", "1", "1.4", "1.8", "2.2"}
    assert set(found["profiles"]) == {"graded", "toyworld"}
    assert (list(found["ablations"]), list(found["alpha"])) == (list(ABLATIONS), list(SWEEP))
    loads = found["load_at_cpr_95"]
    assert loads["ours"] == pytest.approx(1.5, abs=0.08)
    assert loads["sdv2"] is None
    assert found["load_ratio"]["static"] == pytest.approx(1.5 / 0.7, rel=0.15)
    assert found["workloads"]["steady"]["slackserve"]["sp_events"] == 2
    assert found["not_built"] == {}
    count = len(ran)
    assert count == len(set(ran))
    command.run(seeds=2, cells=tmp_path)
    assert len(ran) == count
    assert command.table(found).row_count > 100
    command.run(quick=True)
    assert {cell.workers for cell in ran[count:]} == {16}


def test_the_command_reports_its_rows() -> None:
    found = command.run(
        quick=True, only="workloads", policies="sdv2", workloads="steady", seeds=2, streams=4, rate=1.0
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
