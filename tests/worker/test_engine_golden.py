"""The engine's ring and recache give the public implementations' results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from turboserve.worker.engine.golden import GoldenError, check_file
from turboserve.worker.model.config import ModelConfigError
from turboserve.worker.model.load import CheckpointError

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
FILES = (
    "self_forcing_global",
    "longlive_window6_sink3",
    "longlive_switch",
    "longlive_early_switches",
    "longlive_framewise_window4_sink1",
    "longlive_framewise_window6_sink3",
    "longlive_pairs_window8_sink3",
    "longlive_infinity_window9_sink3",
)


def rewritten(source: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """Copy a reference file with tensors replaced, or removed if None."""
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, target, metadata)
    return target


def test_all_references_are_checked() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.safetensors")) == sorted(FILES)


def test_window_rotation_is_not_the_absolute_one(tmp_path: Path) -> None:
    source = GOLDEN / "longlive_infinity_window9_sink3.safetensors"
    with safe_open(source, "pt") as file:
        config = json.loads(file.metadata()["config"]) | {"rotation": "absolute"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "x", {"config": json.dumps(config)})
    report = check_file(tmp_path / "x")
    # The window is full after three chunks: until then the two are equal.
    assert max(report.per_chunk[:3]) < 5e-6
    assert min(report.per_chunk[3:]) > 1e-3


@pytest.mark.parametrize("name", FILES)
def test_every_chunk_agrees_with_the_reference(name: str) -> None:
    report = check_file(GOLDEN / f"{name}.safetensors")
    assert report.passed
    # Far below the required 1e-4: the rest is float32 rounding, so an error in the math cannot hide.
    assert report.max_abs_error < 5e-6


def test_bfloat16_stays_near_the_reference() -> None:
    report = check_file(GOLDEN / "longlive_switch.safetensors", tolerance=0.2, dtype=torch.bfloat16)
    assert report.passed


def test_a_wrong_result_does_not_pass(tmp_path: Path) -> None:
    source = GOLDEN / "longlive_switch.safetensors"
    with safe_open(source, "pt") as file:
        latents = file.get_tensor("latents")
    latents[5, 0, 0, 0, 0] += 1e-3
    report = check_file(rewritten(source, tmp_path / "wrong.safetensors", latents=latents))
    assert not report.passed
    assert [error > 1e-4 for error in report.per_chunk] == [chunk == 5 for chunk in range(8)]


def test_the_switch_matters(tmp_path: Path) -> None:
    source = GOLDEN / "longlive_switch.safetensors"
    with safe_open(source, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config["switches"] = []
    save_file(tensors, tmp_path / "same.safetensors", {"config": json.dumps(config)})
    report = check_file(tmp_path / "same.safetensors")
    assert max(report.per_chunk[:4]) < 5e-6
    assert min(report.per_chunk[4:]) > 1e-3


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"noise": None}, "tensor noise is missing"),
        ({"noise": torch.zeros(7, 3, 3, 16, 8, 12)}, r"shape of noise is \(7, 3, "),
        ({"latents": torch.zeros(7)}, "dimensions of latents is 1, need 5"),
        ({"latents": torch.zeros(0, 3, 16, 8, 12)}, "no chunk in latents"),
        ({"text": torch.zeros(1, 12, 31)}, "width of text is 31, need 32"),
        ({"text": torch.zeros(1, 13, 32)}, "13 tokens of text, need 1 to 12"),
        ({"text": torch.zeros(0, 12, 32)}, "0 switches need 1 prompt"),
    ],
)
def test_malformed_tensors_are_named(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(GoldenError, match=message):
        check_file(rewritten(GOLDEN / "self_forcing_global.safetensors", tmp_path / "x", **tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": "96"}, "dim: '96' is not an integer"),
        ({"timestep_shift": "5"}, "timestep_shift: '5' is not a finite number"),
        ({"timestep_shift": float("nan")}, "timestep_shift: nan is not a finite number"),
        ({"denoising_steps": 4}, "denoising_steps: 4 is not a list of integers"),
        ({"denoising_steps": [1000, "750"]}, "is not a list of integers"),
        ({"denoising_steps": [1001]}, "denoising_steps: 1001 must be in 1..1000"),
        ({"patch_size": [1, 0, 2]}, "must be greater than 0"),
        ({"num_heads": 5}, "must be a multiple of num_heads"),
        ({"local_attn_size": 5}, "local_attn_size: 5 must be at least"),
        ({"local_attn_size": -2}, "local_attn_size: -2 must be at least"),
        ({"latent_width": 10}, "shape of noise"),
        ({"rotation_frames": 23}, "24 frames, the model's limit is 23"),
        ({"switches": 4}, "switches are 4, need rising"),
        ({"switches": [4, 4]}, "need rising numbers"),
        ({"switches": [5, 2]}, "need rising numbers"),
        ({"switches": ["4"]}, "need rising numbers"),
        ({"switches": [1, 2]}, "2 switches need 3 prompts"),
        ({"num_layers": None}, "num_layers: None is not an integer"),
    ],
)
def test_malformed_headers_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    source = GOLDEN / "longlive_switch.safetensors"
    with safe_open(source, "pt") as file:
        config = json.loads(file.metadata()["config"]) | change
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "x", {"config": json.dumps(config)})
    with pytest.raises((GoldenError, ModelConfigError), match=message):
        check_file(tmp_path / "x")


def test_weights_and_headers_that_do_not_fit_are_errors(tmp_path: Path) -> None:
    source = GOLDEN / "self_forcing_global.safetensors"
    with pytest.raises(CheckpointError, match=r"missing: head\.modulation"):
        check_file(rewritten(source, tmp_path / "c", **{"weights.head.modulation": None}))
    for number, config in enumerate(("", "[]", "{", "null")):
        save_file({"text": torch.zeros(1)}, tmp_path / str(number), {"config": config})
        with pytest.raises(GoldenError, match=str(tmp_path / str(number))):
            check_file(tmp_path / str(number))
    with pytest.raises(GoldenError, match="nowhere"):
        check_file(tmp_path / "nowhere")
