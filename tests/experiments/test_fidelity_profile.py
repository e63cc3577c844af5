"""`turboserve profile fidelity`: latency and quality of the shipped model's configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from turboserve.cli.main import app
from turboserve.experiments.fidelity.profile import configurations, wilson_interval
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.fidelity_profile import FidelityProfile
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.model.presets import preset


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", "fidelity", *arguments])


def test_the_grid_has_the_best_and_the_cheapest_configuration() -> None:
    for name, windows in (("toyworld", {1, 2}), ("self-forcing-1-3b", {1, 4, 7})):
        config = preset(name)
        grid = configurations(config)
        assert len(grid) == len(set(grid)) == 4 * len(windows) * 3
        assert {each.window_chunks for each in grid} == windows
        assert {Fidelity.best(config), Fidelity(1, 1, 0.8)} <= set(grid)
        with_both = configurations(config, fast_decoder=True)
        assert len(set(with_both)) == 2 * len(grid)
        assert Fidelity(1, 1, 0.8, fast_decoder=True) in with_both


@given(st.floats(0, 1), st.integers(1, 1000))
def test_an_interval_holds_its_mean(mean: float, count: int) -> None:
    low, high = wilson_interval(mean, count)
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1
    assert high - low > 0.003


def test_the_shipped_model_is_measured_with_its_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few prompts: a window that hides the past costs motion, whatever the noise of so small a sample."""
    # Times are not compared.
    monkeypatch.setattr("turboserve.experiments.fidelity.profile.ROUNDS", 1)
    out = tmp_path / "fidelity.json"
    found = run("--out", str(out), "--prompts", "3", "--steps", "1", "--steps", "4", "--sparsity", "0")
    assert found.exit_code == 0, found.output
    config = preset("toyworld")
    profile = FidelityProfile.read(out, config, model=fingerprint(config), device="cpu")
    quality = {each.fidelity: each.quality for each in profile.measured}
    assert set(quality) == {Fidelity(steps, window) for steps in (1, 4) for window in (1, 2)}
    assert quality[Fidelity(4, 2)] > 0.9
    assert quality[Fidelity(4, 2)] > quality[Fidelity(4, 1)]
    assert all(each.seconds > 0 for each in profile.measured)
    assert f"floor {profile.floor:.3f}" in found.output

    # Another model has no judge: a file states the quality, and latency is measured again.
    again = tmp_path / "again.json"
    found = run("--out", str(again), "--quality", str(out))
    assert found.exit_code == 0, found.output
    second = FidelityProfile.read(again, config, model=fingerprint(config), device="cpu")
    assert {each.fidelity: each.quality for each in second.measured} == quality
    assert second.prompts == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "5"), "fidelity.steps: 5 must be in 1..4"),
        (("--sparsity", "1"), "fidelity.sparsity: 1.0 must be at least 0 and below 1"),
        (("--quality", "missing.json"), "--quality: missing.json: FileNotFoundError"),
    ],
)
def test_wrong_options_are_refused_by_name(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    found = run("--out", str(tmp_path / "out.json"), *arguments)
    assert found.exit_code != 0
    assert message in " ".join(found.output.split())


def test_attention_that_the_device_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOSERVE_ATTENTION", "fp8")
    found = run("--out", str(tmp_path / "out.json"))
    assert found.exit_code != 0
    assert "attention fp8: cpu is no GPU" in " ".join(found.output.split())


def test_a_quality_file_of_another_form_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    file.write_text(json.dumps({"prompts": 3, "configurations": [{"steps": 4}]}))
    found = run("--out", str(tmp_path / "out.json"), "--quality", str(file))
    assert found.exit_code != 0
    assert "--quality" in found.output
