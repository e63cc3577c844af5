"""`turboserve bench mixed`: the family of matrices, snapshots, and figures."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from turboserve.allocation.classes import Capability
from turboserve.autoscaler.control.pool_offers import OfferWorkers
from turboserve.bench.report import BenchError
from turboserve.experiments.mixed import analytic, command, switching
from turboserve.experiments.mixed.family import (
    CLASSES,
    MEMORY_BYTES,
    MIXES,
    classes_drawn,
    coefficient_of_variation,
    matrix,
)
from turboserve.experiments.mixed.figures import gains, median_interval
from turboserve.experiments.mixed.snapshot import POLICIES, fluid_load, in_time, load_at_99
from turboserve.scheduler.placement import Kind
from turboserve.scheduler.placement.pool import CHUNK_S

PUBLISHED_CV = {"S1": 0.112, "S2": 0.186, "S3": 0.275, "S4": 0.472, "S5": 0.688}


def test_the_mixes_are_those_of_oserve() -> None:
    for mix, cv in PUBLISHED_CV.items():
        assert coefficient_of_variation(MIXES[mix]) == pytest.approx(cv, abs=5e-4)
        assert sum(MIXES[mix]) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("number", range(20))
def test_a_matrix_is_of_the_declared_family(number: int) -> None:
    drawn = matrix(number)
    assert drawn == matrix(number)
    for capability, latency_s in zip(drawn.capabilities, drawn.latency_s, strict=True):
        assert capability.memory_bytes in MEMORY_BYTES
        for one in CLASSES:
            n = capability.sessions[one]
            assert n >= 1
            assert n * capability.state_bytes[one] <= capability.memory_bytes
            assert latency_s[one][n] <= CHUNK_S * (1 + 1e-9)


def test_sessions_are_drawn_by_the_mix() -> None:
    counts = Counter(islice(classes_drawn("S5", 1), 20_000))
    for one, share in zip(CLASSES, MIXES["S5"], strict=True):
        assert counts[one] / 20_000 == pytest.approx(share / sum(MIXES["S5"]), abs=0.02)
    assert list(islice(classes_drawn("S5", 1), 9)) == list(islice(classes_drawn("S5", 1), 9))


@pytest.mark.parametrize("name", POLICIES)
def test_few_sessions_are_all_in_time_and_too_many_are_not(name: str) -> None:
    of, policy = matrix(1), POLICIES[name]()
    sessions = list(islice(classes_drawn("uniform", 0), 1000))
    assert all(share == 1 for share in in_time(of, policy, sessions[:8]).values())
    late = in_time(of, policy, sessions, 60.0)
    assert min(late.values()) < 0.9


def test_the_highest_load_is_where_chunks_become_late() -> None:
    overall, each = load_at_99(1, "S3", "ours", 0)
    assert 0 < each <= overall <= fluid_load(matrix(1), "S3") * 1.2
    sessions = list(islice(classes_drawn("S3", 0), overall + 1))

    def share(count: int) -> float:
        good = in_time(matrix(1), POLICIES["ours"](), sessions[:count])
        counts = Counter(sessions[:count])
        return sum(good[one] * counts[one] for one in counts) / count

    assert share(overall) >= 0.99 > share(overall + 1)


def test_gains_are_paired() -> None:
    found = gains({"ours": [20.0, 30.0, 40.0], "static": [10.0, 30.0, 10.0]}, "ours")
    assert found["static"]["median"] == 2.0
    assert found["static"]["worst"] == 1.0
    low, high = median_interval([1.0, 2.0, 3.0])
    assert 1.0 <= low <= high <= 3.0


def test_no_policy_exceeds_the_load_that_gives_up_the_dearest_sessions() -> None:
    heavy, light = CLASSES[0], CLASSES[2]
    kinds = [Kind("k", 1, Capability({heavy: 2, light: 10}))]
    # Of 7.407 sessions 0.741 are heavy and 0.0741 of those are not served: 0.667 / 2 + 6.667 / 10 = 1.
    assert analytic.most_of_any(kinds, {heavy: 0.1, light: 0.9}) == pytest.approx(1 / 0.135)
    loads = analytic.analytic_loads(3)["S5"]
    assert max(of_all for of_all, _ in loads.values()) <= loads["any"][0] * 1.0005
    assert loads["oserve_exact"][0] == pytest.approx(loads["any"][0], rel=0.01)
    assert max(of_each for _, of_each in loads.values()) <= loads["any"][1] * 1.0005


def test_a_run_that_was_cut_off_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MIXES", {"S5": MIXES["S5"]})
    options = {"only": "loads,placed", "seeds": 1, "matrices": 2, "placed": 1, "first_seed": 3}
    first = command.run(**options, cells=tmp_path)  # type: ignore[arg-type]
    finished = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert len(finished) == 2 + len(POLICIES) + 1
    for figures in (first, first["placed"]):
        assert figures["load_at_99"]["S5"]["ours"] >= figures["load_at_99"]["S5"]["static"]
    one = sorted(finished)[0]
    (tmp_path / one).unlink()
    again = command.run(**options, cells=tmp_path)  # type: ignore[arg-type]
    assert again == first
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == finished


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(BenchError, match=r"--only: 'lods' is not known; known: loads, "):
        command.run(only="lods")


def short_run(monkeypatch: pytest.MonkeyPatch, mode: str) -> dict[str, float]:
    monkeypatch.setattr(switching, "TRACES", {"T": (400.0, ("S2", "S5"))})
    return switching.switching_run(4, "T", mode, 1)


def test_a_pool_that_switches_keeps_places_and_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, peers = short_run(monkeypatch, "none"), short_run(monkeypatch, "peers")
    assert fixed["started"] == 0
    assert peers["started"] > 0
    assert peers["cost"] < fixed["cost"]
    assert fixed["without_place"] == peers["without_place"] == 0


def test_a_release_that_takes_a_place_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfferWorkers, "keeps_places", lambda *_: True)
    assert short_run(monkeypatch, "disk")["without_place"] > 0
