"""`turboserve bench paper`: Table 4, batching, sensitivity and SlackServe's workloads at tiny sizes."""

from __future__ import annotations

import statistics

import pytest

from turboserve.experiments.paper import batching, sensitivity, slackserve, table4
from turboserve.experiments.paper.experiment import Scale

QUICK = Scale(quick=True, draws=1)
KEYS = {"paper", "ours", "interval", "ratio", "wanted", "met", "declared"}


def test_table_4() -> None:
    found = table4.run("H20 1.3B", 0, "M")
    assert found["share_percent"] == pytest.approx(100 * 23 / found["mean_ms"], abs=0.01)
    report = table4.report(QUICK, dict.fromkeys(table4.cells(QUICK), found))
    assert report.keys() == KEYS
    assert report["ratio"]["H20 1.3B"] == pytest.approx(found["mean_ms"] / 1054, abs=1e-3)
    assert len(table4.rows(report)) == 2
    across = report["declared"]["transfer_ms"]["InfiniBand"]
    assert across == pytest.approx(1000 * table4.STATE_BYTES / 50e9, abs=0.01)


def test_intervals_have_the_wanted_rate_and_variation() -> None:
    times = batching.gamma(20_000, 4.0, 2.0, 0)
    gaps = [after - before for before, after in zip((0.0, *times), times, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(2.0, rel=0.1)


def test_batching() -> None:
    results = {}
    for cell in batching.cells(QUICK):
        profile, sweep, seed, _ = cell.arguments
        results[cell] = batching.run(profile, sweep, seed, 60)
    report = batching.report(QUICK, results)
    assert report.keys() == KEYS
    assert report["met"].keys() == report["wanted"].keys()
    for sweeps in report["ours"].values():
        deadline = [point["step"]["mean"] for point in sweeps["deadline"]]
        assert deadline == sorted(deadline), "a longer deadline is met by no fewer chunks"
    friendly = report["ours"]["batch-friendly"]["load"]
    assert friendly[0]["step"]["mean"] > friendly[-1]["fcfs"]["mean"]
    assert len(batching.rows(report)) == 8


def test_sensitivity() -> None:
    results = {
        cell: sensitivity.run(name, value, 0, "M")
        for cell in sensitivity.cells(Scale(draws=1))
        for name, value, _ in (cell.arguments,)
        if name in ("start_up_s", "delta") and value in (2.0, 60.0, 0.05, 0.15)
    }
    report = sensitivity.report(QUICK, results)
    assert report.keys() == KEYS
    fast, slow = report["ours"]["start_up_s"]
    assert fast["late_percent"]["mean"] < slow["late_percent"]["mean"]
    assert report["declared"]["cost_change_percent"]["eta"] is None
    assert report["declared"]["cost_change_percent"]["delta"] >= 0
    assert len(sensitivity.rows(report)) == 4


def test_slackserve() -> None:
    found = slackserve.run("steady", "ours", 0, 2, workers=1)
    assert 0 <= found["cpr"] <= 1
    assert found["violations"] == 0
    report = slackserve.report(QUICK, dict.fromkeys(slackserve.cells(QUICK), found))
    assert report.keys() == KEYS
    assert report["ratio"] == {"steady": pytest.approx(found["cpr"] / 0.932, abs=1e-3)}
    assert len(slackserve.rows(report)) == 4
