"""The case `unseen`, and the generators of bursts."""

from __future__ import annotations

import pytest

from turboserve.experiments.autoscale import unseen
from turboserve.experiments.autoscale.bursts import GENERATORS, MEAN_SESSIONS
from turboserve.experiments.autoscale.result_tables import TABLES


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_repeat_and_hold_about_their_mean(name: str) -> None:
    trace = GENERATORS[name](3)
    assert trace.digest == GENERATORS[name](3).digest != GENERATORS[name](4).digest
    active = trace.active()
    assert MEAN_SESSIONS / 3 < sum(active) / len(active) < 3 * MEAN_SESSIONS
    assert trace.peak > 1.5 * sum(active) / len(active)


def test_no_unseen_trace_was_tuned_on() -> None:
    assert not set(unseen.TUNED) & set(unseen.UNSEEN)


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
