"""The engine's ring and recache give the public implementations' results."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from turboserve.worker.engine.golden import GoldenError, check_file
from turboserve.worker.model.load import CheckpointError

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
FILES = (
    "self_forcing_global",
    "longlive_window6_sink3",
    "longlive_switch",
    "longlive_early_switches",
    "longlive_framewise_window4_sink1",
)


def rewritten(source: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """A copy of a reference file with tensors replaced, or removed where None."""
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


@pytest.mark.parametrize("name", FILES)
def test_every_chunk_agrees_with_the_reference(name: str) -> None:
    report = check_file(GOLDEN / f"{name}.safetensors")
    assert report.passed
    # Far below the 1e-4 asked for: what is left is float32 rounding, so an error in the maths cannot hide.
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


def test_malformed_files_name_what_is_wrong(tmp_path: Path) -> None:
    source = GOLDEN / "self_forcing_global.safetensors"
    with pytest.raises(GoldenError, match="tensor noise is missing"):
        check_file(rewritten(source, tmp_path / "a.safetensors", noise=None))
    with pytest.raises(GoldenError, match="noise has shape"):
        check_file(rewritten(source, tmp_path / "b.safetensors", noise=torch.zeros(7, 3, 3, 16, 8, 12)))
    with pytest.raises(CheckpointError, match=r"missing: head\.modulation"):
        check_file(rewritten(source, tmp_path / "c.safetensors", **{"weights.head.modulation": None}))
