"""`turboserve bench slack` on small runs of the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turboserve.bench.report import BenchError
from turboserve.experiments.slack import cells, command
from turboserve.experiments.slack.cells import Cell, CellStore, simulate
from turboserve.experiments.slack.metrics import StreamMetrics, measure
from turboserve.experiments.slack.policies import POLICIES, SlackPolicy
from turboserve.experiments.slack.workloads import steady
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


def test_the_command_reports_built_rows_and_names_what_the_others_lack() -> None:
    found = command.run(
        quick=True,
        only="workloads",
        policies="sdv2,slackserve",
        workloads="steady",
        seeds=2,
        streams=4,
        rate=1.0,
    )
    rows = found["workloads"]["steady"]
    assert rows["slackserve"] == {"not_built": "elastic sequence parallelism"}
    assert 0.0 < rows["sdv2"]["cpr"] <= 1.0
    assert rows["sdv2"]["violations"] == 0
    assert rows["sdv2"]["sp_events"] is None
    assert command.table(found).row_count == 2


def test_a_row_whose_setting_does_not_exist_is_not_built() -> None:
    assert SlackPolicy("", "fcfs", "least-loaded", {"no_such": 1}).not_built == "setting no_such"
    assert SlackPolicy("", "no-such", "least-loaded").not_built == "gather policy no-such"
    assert POLICIES["sdv2"].not_built is None


@pytest.mark.parametrize("option", ["only", "policies", "workloads", "profile"])
def test_an_unknown_name_is_refused(option: str) -> None:
    options: dict[str, Any] = {option: "no-such"}
    with pytest.raises(BenchError, match=f"--{option}: .*no-such.* known: "):
        command.run(**options)
