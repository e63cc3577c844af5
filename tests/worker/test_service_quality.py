"""Quality of chunks in a worker's reports, its floor's capacity, and the profile that it starts with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from turboserve.contracts.fidelity import ChunkFidelity
from turboserve.contracts.workers import HeldSession
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_ladder import FidelityLadder, Rung
from turboserve.worker.engine.fidelity_profile import FidelityProfile
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.profile_file import InvalidProfileError
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.model.presets import preset
from turboserve.worker.replicas.toyworld import load_toyworld
from turboserve.worker.service.models import SHIPPED_FIDELITY, fidelity_ladder
from turboserve.worker.service.quality import (
    WINDOW_S,
    QualityBoard,
    chunk_fidelity,
    fidelity_from,
    floor_seconds,
)
from turboserve.worker.service.table import Table
from turboserve.worker.settings import Settings

CHEAP = Fidelity(2, 3)
LADDER = FidelityLadder(
    (Rung(Fidelity(4, 3), 5.0, 1.0), Rung(CHEAP, 3.0, 0.9), Rung(Fidelity(1, 1), 2.0, 0.5)), floor=0.8
)
LOWERED = ChunkFidelity(steps=2, window_chunks=3, quality=0.9)


def test_a_header_has_the_configuration_and_its_measured_quality() -> None:
    assert chunk_fidelity(None, LADDER) is None
    assert chunk_fidelity(CHEAP, LADDER) == LOWERED
    unknown = chunk_fidelity(Fidelity(3, 1, 0.5), LADDER)
    assert unknown == ChunkFidelity(steps=3, window_chunks=1, sparsity=0.5, quality=None)
    for each in (CHEAP, Fidelity(3, 1, 0.5), replace(CHEAP, fast_decoder=True)):
        assert fidelity_from(chunk_fidelity(each, LADDER)) == each


def test_quality_and_its_debt_are_those_of_the_last_minute() -> None:
    board = QualityBoard()
    assert (board.mean(0.0), board.debt(0.0)) == (None, 0.0)
    board.made("a", 1, None, lowered=False, now=0.0)
    for at in (10.0, 20.0, 30.0):
        board.made("a", 1, LOWERED, lowered=True, now=at)
    assert board.mean(30.0) == pytest.approx((1.0 + 3 * 0.9) / 4)
    assert board.debt(30.0) == 0.75
    assert board.debt(WINDOW_S) == 1.0
    assert board.mean(WINDOW_S + 15.0) == pytest.approx(0.9)
    assert (board.mean(WINDOW_S + 31.0), board.debt(WINDOW_S + 31.0)) == (None, 0.0)
    board.made("a", 1, ChunkFidelity(steps=1, window_chunks=1), lowered=True, now=200.0)
    assert (board.mean(200.0), board.debt(200.0)) == (None, 1.0)


def test_what_a_client_has_set_is_no_debt() -> None:
    """Incident: a session with a configuration of its own kept its pool from shrinking."""
    board = QualityBoard()
    board.made("a", 1, LOWERED, lowered=False, now=0.0)
    assert board.mean(0.0) == pytest.approx(0.9)
    assert board.debt(0.0) == 0.0


def test_a_held_session_has_the_configuration_of_its_newest_chunk_and_run() -> None:
    board = QualityBoard()
    held = tuple(HeldSession(session=name, epoch=1, next_chunk=3) for name in ("a", "b", "c"))
    board.made("a", 1, LOWERED, lowered=LOWERED is not None, now=0.0)
    board.made("b", 1, LOWERED, lowered=LOWERED is not None, now=0.0)
    board.made("b", 1, None, lowered=None is not None, now=1.0)
    board.made("c", 1, LOWERED, lowered=LOWERED is not None, now=1.0)
    found = {each.session: each.fidelity for each in board.onto(held, {"a": 1, "b": 1, "c": 2})}
    assert found == {"a": LOWERED, "b": None, "c": None}
    board.forget("a")
    assert board.onto(held, {"a": 1}) == held


def test_the_floors_latency_is_that_of_the_fastest_configuration_above_the_floor() -> None:
    assert floor_seconds({1: 0.5, 2: 1.0}, LADDER) == pytest.approx({1: 0.3, 2: 0.6})
    assert floor_seconds({1: 0.5}, FidelityLadder(LADDER.rungs, floor=0.95)) == {}


def test_a_table_holds_sessions_up_to_the_floors_capacity_and_reports_both() -> None:
    plain, absorbing = Table("w", "toyworld", 2, 10.0), Table("w", "toyworld", 2, 10.0, 4)
    assert (plain.capacity, plain.floor_capacity) == (2, 2)
    assert (absorbing.capacity, absorbing.floor_capacity) == (2, 4)


@pytest.fixture
def toyworld() -> Models:
    return load_toyworld(torch.device("cpu"), None)


def test_the_shipped_profile_is_of_the_shipped_model(toyworld: Models) -> None:
    device = torch.device("cpu")
    assert fidelity_ladder(toyworld, Settings(fidelity="best"), device) is None
    ladder = fidelity_ladder(toyworld, Settings(), device)
    assert ladder == fidelity_ladder(toyworld, Settings(fidelity="in-time"), device)
    assert ladder is not None
    assert ladder.best.fidelity == Fidelity.best(toyworld.transformer.config)
    assert len(ladder.rungs) > 1
    lowest = ladder.rungs[ladder.lowest(None, pinned=False)]
    assert lowest.forwards < ladder.best.forwards
    assert lowest.quality >= ladder.floor
    floored = fidelity_ladder(toyworld, Settings(fidelity="in-time", fidelity_floor=0.25), device)
    assert floored is not None
    assert floored.floor == 0.25


def test_a_profile_of_another_device_or_model_is_ignored_and_a_broken_one_ends_the_start(
    toyworld: Models, tmp_path: Path
) -> None:
    device = torch.device("cpu")
    shipped: dict[str, Any] = json.loads(SHIPPED_FIDELITY["toyworld"].read_text())
    path = tmp_path / "profile.json"
    settings = Settings(fidelity="in-time", fidelity_profile=path)
    for field, value in (("device", "cuda"), ("model", "other")):
        path.write_text(json.dumps({**shipped, field: value}))
        assert fidelity_ladder(toyworld, settings, device) is None
    for broken in ({**shipped, "version": 9}, {**shipped, "configurations": []}):
        path.write_text(json.dumps(broken))
        with pytest.raises(InvalidProfileError):
            fidelity_ladder(toyworld, settings, device)
    other_weights = Settings(fidelity="in-time", model_weights=tmp_path / "mine.safetensors")
    assert fidelity_ladder(toyworld, other_weights, device) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, None),
        ({"model_weights": "mine.safetensors"}, None),
        ({"fidelity": "best", "fidelity_profile": SHIPPED_FIDELITY["toyworld"]}, None),
        ({"fidelity": "in-time", "model_weights": "mine.safetensors"}, "no fidelity profile"),
        ({"fidelity": "in-time"}, "fidelity profile ignored"),
        ({"fidelity_profile": SHIPPED_FIDELITY["toyworld"]}, "fidelity profile ignored"),
    ],
)
def test_only_what_was_set_and_has_no_effect_is_logged(
    toyworld: Models, monkeypatch: pytest.MonkeyPatch, given: dict[str, str | Path], why: str | None
) -> None:
    """The shipped files are for a CPU. Settings come from the environment, as a worker's do."""
    for name, value in given.items():
        monkeypatch.setenv(f"TURBOSERVE_{name.upper()}", str(value))
    with capture_logs() as lines:
        assert fidelity_ladder(toyworld, Settings(), torch.device("cuda")) is None
    assert [line["event"].partition(":")[0] for line in lines] == ([] if why is None else [why])


def test_a_worker_with_one_decoder_leaves_out_what_needs_another(toyworld: Models, tmp_path: Path) -> None:
    shipped: dict[str, Any] = json.loads(SHIPPED_FIDELITY["toyworld"].read_text())
    least = min(each["seconds"] for each in shipped["configurations"])
    best = Fidelity.best(toyworld.transformer.config)
    fast = {**replace(best, fast_decoder=True).to_mapping(), "seconds": least / 2}
    shipped["configurations"].append({**fast, "quality": 1.0, "interval": [0.9, 1.0]})
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(shipped))
    settings, device = Settings(fidelity="in-time", fidelity_profile=path), torch.device("cpu")
    two = replace(toyworld, fast_decoder=toyworld.decoder)
    apart = settings.model_copy(update={"roles": "denoise"})
    for models, given, has in ((toyworld, settings, False), (two, settings, True), (two, apart, False)):
        ladder = fidelity_ladder(models, given, device)
        assert ladder is not None
        assert any(rung.fidelity.fast_decoder for rung in ladder.rungs) is has


@pytest.mark.parametrize("name", SHIPPED_FIDELITY)
def test_the_configurations_that_ship_are_of_the_weights_beside_them(name: str) -> None:
    config = preset(name)
    found = FidelityProfile.read(SHIPPED_FIDELITY[name], config, model=fingerprint(config), device="cpu")
    ladder = FidelityLadder.of_profile(found, config)
    assert ladder.rungs[ladder.lowest(None, pinned=False)].forwards < ladder.best.forwards
    assert found.prompts >= 100
