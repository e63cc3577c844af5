"""`turboserve bench agreement`: recorded decisions, figures of both sides, the fit, and what counts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from turboserve.autoscaler import messages as pool
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.bench.streaming.player import Player
from turboserve.experiments.agreement import outcome, prediction, recording, summary, toyworld
from turboserve.experiments.agreement.declared import POLICIES, Constants, Declared, Size
from turboserve.experiments.agreement.fit import fitted
from turboserve.experiments.agreement.outcome import SeenChunk, compared, matched
from turboserve.experiments.agreement.real import void_reason
from turboserve.experiments.agreement.recording import POOL, SCHEDULER, Handled, Recorder, Recording
from turboserve.experiments.agreement.simulated import Disturbances, simulate
from turboserve.scheduler.app import core_of
from turboserve.scheduler.messages import AllListed, ListAll, Tick
from turboserve.scheduler.settings import SchedulerSettings

TINY = Size(workers=2, minutes=0.4, sessions=6)
STAGES = {
    "text": {"1": 0.002},
    "recache": {"1": 0.02},
    "forward": {"1": 0.006, "2": 0.011, "4": 0.02},
    "decode": {"1": 0.01},
    "package": {"1": 0.004},
}


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """A run with constants that no fit has seen."""
    return simulate(Declared(TINY, POLICIES[0], 1), Constants(9.0, 0.015))


def test_a_trace_is_cut_to_its_size() -> None:
    trace = TINY.trace(0)
    assert trace.ends_s == pytest.approx(24.0)
    assert 3 <= trace.peak <= TINY.sessions
    assert Size().trace(0).peak <= 48
    assert Size().trace(0) != Size().trace(1)


def test_a_simulated_run_has_all_figures(known: dict[str, Any]) -> None:
    assert known["chunks"] > 50
    assert known["refused"] == 0
    assert known["violations"] == {}
    # A chunk has five forwards; beside others they are slower.
    assert 5 * (0.06 + 0.015) <= known["p50_s"] <= known["p95_s"]
    assert known["cost_worker_s"] >= TINY.least * 24.0 * 0.99
    assert set(known["decisions"]) == {"scheduler", "pool", "controller"}
    assert summary.identical([{"real": known}])


def test_the_fit_finds_the_constants_of_a_run(known: dict[str, Any]) -> None:
    # With six sessions it depends on the draw which of them meet, and the fit of so short a run with it.
    run = Declared(replace(TINY, sessions=3), POLICIES[0], 1)
    real = simulate(run, Constants(9.0, 0.015))
    found = fitted(real, lambda constants: simulate(run, constants), run.title)
    assert found.start_s == pytest.approx(9.0, abs=0.5)
    assert found.forward_extra_s == pytest.approx(0.015, rel=0.01)
    # A start that differs by milliseconds places sessions otherwise, which moves the median of 77 chunks far.
    errors = compared(known, simulate(Declared(TINY, POLICIES[0], 1), Constants(9.0, 0.015)))
    assert errors["p50_error_percent"] == 0.0


def test_a_changed_decision_is_found(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.pickle"
    settings = SchedulerSettings()
    core = Recorder(file).scheduler(core_of(settings), settings)
    [listing] = core.handle(Tick(), 0.0)
    assert isinstance(listing, ListAll)
    core.handle(AllListed(listing.ticket, (), ()), 0.1)
    with file.open("ab") as end:
        # As an entry that is cut off by the end of its process.
        end.write(b"\x80\x05\x95")
    read = recording.read(tmp_path)
    assert recording.decisions(read) == {SCHEDULER: {"cores": 1, "events": 2, "different": 0}}
    [only] = read
    first, second = only.handled
    changed = replace(only, handled=[Handled(first.now, first.event, []), second])
    assert recording.decisions([only, changed])[SCHEDULER] == {"cores": 2, "events": 4, "different": 1}
    assert [each.now for each in recording.handled([only, changed], SCHEDULER)] == [0.0, 0.0, 0.1, 0.1]
    assert not summary.identical([{"real": {"decisions": {SCHEDULER: {"events": 2, "different": 1}}}}])
    assert not summary.identical([{"real": {"decisions": {SCHEDULER: {"events": 0, "different": 0}}}}])


def test_cost_and_actions_come_from_the_pools_events() -> None:
    def handled(now: float, event: Any, *commands: Any) -> Handled:
        return Handled(now, event, list(commands))

    pool_ = Recording(POOL, AutoscalerSettings(), handled=[
        handled(2.0, pool.Tick(), pool.Launch(1, "local-0", "wk0_a")),
        handled(14.0, pool.SizeWanted(2, "busy"), pool.Launch(2, "local-1", "wk1_b")),
        handled(20.0, pool.SizeWanted(1, "idle"), pool.Release(3, "local-1", "wk1_b", "idle")),
        handled(21.5, pool.Done(3)),
        handled(31.0, pool.SizeWanted(3, "after the trace")),
    ])  # fmt: skip
    scheduler = Recording(SCHEDULER, SchedulerSettings())
    player = Player(stalls=1, stall_s=0.5)
    chunks = [SeenChunk("s0", index, "wk0_a", 0.1 * index, 1.0) for index in range(1, 5)]
    found = outcome.figures([pool_, scheduler], chunks, [player], 10.0, 20.0)
    assert found["cost_worker_s"] == pytest.approx(20.0 + 7.5)
    assert found["actions"] == [[4.0, 2], [10.0, 1]]
    assert found["late_percent"] == pytest.approx(25.0)
    assert found["p50_s"] == found["mean_s"] == pytest.approx(0.25)
    assert found["release_s"] == pytest.approx(1.5)


def test_actions_are_matched_in_order() -> None:
    real = [[1.0, 3], [20.0, 4], [60.0, 3]]
    simulated = [[1.5, 3], [2.0, 5], [23.0, 4], [60.5, 3]]
    assert matched(real, simulated) == pytest.approx([0.5, 3.0, 0.5])
    assert matched([], simulated) == []


def test_void_runs_do_not_count() -> None:
    assert void_reason(0.7) is None
    assert "0.71" in str(void_reason(0.71))

    def run(policy: str, void: str | None, error: float, p95_s: float) -> dict[str, Any]:
        side = {"p95_s": p95_s, "decisions": {"scheduler": {"events": 3, "different": 0}}}
        errors = dict.fromkeys(summary.WANTED, error)
        counts = {"actions_real": 2, "actions_within": 1}
        return {"void": void, "real": side, "simulated": side, **errors, **counts, "policy": policy}

    runs = {"a": [run("a", None, -1.5, 0.4), run("a", "busy", 90.0, 9.0)], "b": [run("b", None, 1.0, 0.3)]}
    found = summary.summed(runs, [])
    assert found["cost_error_percent"] == -1.5
    assert found["met"]["cost_error_percent"] is True
    assert found["met"]["late_points"] is False
    assert found["void_runs"] == 1
    assert found["ranking"]["real"] == ["b", "a"]
    assert found["ranking_equal"] is True
    nothing = summary.summed({"a": [run("a", "busy", 90.0, 9.0)]}, [])
    assert nothing["cost_error_percent"] is nothing["met"]["cost_error_percent"] is None
    assert nothing["ranking_equal"] is None
    assert nothing["decisions_identical"] is True


def test_toyworlds_chunks_count_at_their_number_of_sessions() -> None:
    trace = toyworld.staircase(10.0)
    assert trace.active()[5::10] == [1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8], "fitted stages are longer"
    phases = sorted(step.at % toyworld.CHUNK_S for step in trace.steps)
    assert min(later - phase for phase, later in pairwise(phases)) > toyworld.CHUNK_S / 12
    stages = toyworld.stages(10.0)
    assert all(
        abs(step.at - stage.begins_s) < 2 * toyworld.CHUNK_S
        for step, stage in zip(trace.steps, stages, strict=True)
    )
    chunks = [
        SeenChunk("s0", 0, "w", 0.1, 2.0),
        SeenChunk("s0", 1, "w", 0.2, 29.0),
        SeenChunk("s1", 0, "w", 0.4, 39.0),
    ]
    found = toyworld.by_sessions(chunks, 10.0)
    assert [found[n]["chunks"] for n in ("1", "2", "3")] == [1, 1, 0]
    assert found["1"]["p50_s"] == 0.2
    assert toyworld.compared({"by_sessions": found}, {"by_sessions": found})["2"]["p95_error_percent"] == 0.0


def test_toyworld_is_predicted_from_its_stages() -> None:
    found = toyworld.simulated(json.dumps(STAGES), 4.0)["by_sessions"]
    # On one core the chunk is decoded before the last forward, which only writes the context, and packaged
    # beside it, at half of the pace.
    assert found["1"]["p50_s"] == pytest.approx(4 * 0.006 + 0.01 + 2 * 0.004, abs=1e-4)
    assert found["8"]["p95_s"] >= found["1"]["p50_s"] - 1e-6


def test_a_prediction_is_the_median_of_repeats() -> None:
    def run(p50_s: float, migrations: int, *actions: list[float]) -> dict[str, Any]:
        figures: dict[str, Any] = {
            "cost_worker_s": 9.0,
            "mean_s": 0.5,
            "p50_s": p50_s,
            "p95_s": 1.0,
            "release_s": None,
            "decisions": {},
        }
        return {
            **figures,
            "migrations": migrations,
            "actions": list(actions),
            "refused": 1,
            "violations": {"lease": 1} if p50_s > 1 else {},
        }

    usual = run(0.3, 7, [1.0, 2], [9.0, 3])
    found = prediction.predicted([run(1.2, 3, [4.0, 2]), usual, run(0.4, 5, [1.5, 2], [9.2, 3])])
    assert found["p50_s"] == 0.4
    assert found["migrations"] == 5
    assert found["spread"]["p50_s"] == [0.3, 1.2]
    assert found["spread"]["migrations"] == [3, 7]
    assert found["actions"] == usual["actions"]
    assert found["release_s"] is None
    assert found["refused"] == 3
    assert found["violations"] == {"lease": 1}
    assert found["repeats"] == 3


def test_sharing_a_core_is_fitted_on_two_numbers_of_sessions() -> None:
    predicted = {number: {"p50_s": 9.0, "p95_s": 9.0} for number in "234567"}
    ends = {"1": {"p50_s": 0.09, "p95_s": 0.12}, "8": {"p50_s": 0.15, "p95_s": 0.4}}
    alone = {"by_sessions": {"1": {"p50_s": 0.06, "p95_s": 0.06}, "8": {"p50_s": 0.1, "p95_s": 0.2}}}
    found = toyworld.fitted({"by_sessions": {**predicted, **ends}}, alone)
    assert found.slowdown == 1.5
    # With eight sessions the times also spread without sharing, by a factor of 2.
    assert found.p95 == pytest.approx(4 / 3, abs=1e-3)
    silent = {"by_sessions": {"1": {"p50_s": None, "p95_s": None}}}
    assert toyworld.fitted(silent, alone) == toyworld.Sharing()
    profiled = toyworld.device(json.dumps(STAGES), 1.5)
    assert profiled.forward_s[2] == pytest.approx(1.5 * 0.011)
    assert profiled.decode_s[1] == pytest.approx(1.5 * (0.01 + 0.004))
    disturbances = Disturbances(found.p95, 1 / found.slowdown, toyworld.CHUNK_S)
    drawn = sorted(disturbances.draw(random) for random in [Random(0)] for _ in range(2000))
    assert drawn[1000] == pytest.approx(1.0, abs=0.03)
    assert drawn[1900] == pytest.approx(4 / 3, abs=0.06)
    assert drawn[0] >= 1 / found.slowdown
