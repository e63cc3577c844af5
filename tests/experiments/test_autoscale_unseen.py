"""The case `unseen`, and the generators of bursts."""

from __future__ import annotations

import pytest

from turboserve.experiments.autoscale import unseen
from turboserve.experiments.autoscale.bursts import GENERATORS, MEAN_SESSIONS
from turboserve.experiments.autoscale.result_tables import TABLES
from turboserve.experiments.paper import headroom
from turboserve.experiments.paper.experiment import Scale


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_repeat_and_hold_about_their_mean(name: str) -> None:
    trace = GENERATORS[name](3)
    assert trace.digest == GENERATORS[name](3).digest != GENERATORS[name](4).digest
    active = trace.active()
    assert MEAN_SESSIONS / 3 < sum(active) / len(active) < 3 * MEAN_SESSIONS
    assert trace.peak > 1.5 * sum(active) / len(active)


def test_no_unseen_trace_was_tuned_on() -> None:
    assert not set(unseen.TUNED) & set(unseen.UNSEEN)
    generators = ["other windows", *GENERATORS]
    tuned = {unseen.TUNED[f"{name} 0"]().digest for name in generators if f"{name} 0" in unseen.TUNED}
    drawn = {headroom.KINDS[name](headroom.FIRST_SEED).digest for name in generators}
    assert len(drawn) == len(generators)
    assert len(tuned) == 4
    assert not tuned & drawn


def test_the_grid_compares_every_draw_with_both_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "CONSTANTS", (0.6, 0.9))
    monkeypatch.setattr(headroom, "UTILIZATIONS", (0.6,))
    cells = headroom.cells(Scale())
    assert len({cell.key for cell in cells}) == len(cells) == 10 * 3 * len(headroom.KINDS)
    found = headroom.run("other windows", 2, 10.0)
    assert found["activations"] == 201
    constants = found["fronts"]["constant"]
    assert constants["0.6"][0] > constants["0.9"][0]
    both = [cell for cell in cells if cell.arguments == ("other windows", 2, 10.0)]
    both += [cell for cell in cells if cell.arguments == ("other windows", 3, 10.0)]
    fewer = {**found["learned"], "late": 0, "dearer_than_constant_percent": None}
    report = headroom.report(Scale(), dict(zip(both, [found, {**found, "learned": fewer}], strict=True)))
    row = report["ours"]["10 s"]["other windows"]["learned"]["constant"]
    assert (row["draws"], row["fewer_late_than_any"]) == (2, 1)
    assert row["dearer_percent"]["mean"] == pytest.approx(
        found["learned"]["dearer_than_constant_percent"], abs=1e-3
    )
    assert len(headroom.rows(report)) == 2
    assert report["met"].keys() == report["wanted"].keys()


def test_controllers_are_compared_with_both_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen, "CONSTANTS", (0.6, 0.9))
    monkeypatch.setattr(unseen, "UTILIZATIONS", (0.6,))
    found = unseen.unseen_case("other windows 102", 10.0, lambda line: None)
    constants = [row for name, row in found["baselines"].items() if name.startswith("constant")]
    assert len(constants) == 2
    learned = found["learned"]
    assert learned["activations"] == 201
    if learned["late_activations"] >= max(row["late_activations"] for row in constants):
        cheapest = min(row["cost_worker_s"] for row in constants)
        wanted = round(100 * (learned["cost_worker_s"] / cheapest - 1), 2)
        assert learned["dearer_than_constant_percent"] == pytest.approx(wanted, abs=0.1)
    assert TABLES["unseen"]({"other windows 102": found}).row_count == 2
