"""Profile files: written, read again, and refused if they belong to another configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import EngineOptions
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.profile_file import InvalidProfileError, ProfileFile
from turboserve.worker.model.config import ModelConfig

STAGES = {"forward": {1: 0.1, 4: 0.2}, "decode": {1: 0.05}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = ProfileFile("m", "cpu", STAGES)
    file.write(tmp_path / "profile.json")
    assert ProfileFile.read(tmp_path / "profile.json", model="m", device="cpu") == file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, "model is 'other', must be 'm'"),
        ({"device": "cuda"}, "device is 'cuda', must be 'cpu'"),
        ({"version": 9}, "version is 9"),
        ({"stages": {"dance": {}}}, "stages: must be"),
        ({"stages": {"forward": {"0": 0.1}}}, "stages.forward"),
        ({"stages": {"forward": {"1": -1}}}, "stages.forward"),
        ({"stages": {"forward": 3}}, "stages.forward"),
    ],
)
def test_others_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    ProfileFile("m", "cpu", STAGES).write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InvalidProfileError, match=message):
        ProfileFile.read(path, model="m", device="cpu")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidProfileError):
        ProfileFile.read(tmp_path / "missing", model="m", device="cpu")
    (tmp_path / "text").write_text("[1")
    with pytest.raises(InvalidProfileError):
        ProfileFile.read(tmp_path / "text", model="m", device="cpu")


def test_an_engine_begins_with_them(
    tiny_config: ModelConfig, make_models: Callable[[ModelConfig], Models]
) -> None:
    slab = SlabLayout.of(tiny_config, torch.float32).total_bytes
    engine = Engine(make_models(tiny_config), EngineOptions(slab), profiles=STAGES)
    assert engine.forward.profile(4) == 0.2
    assert engine.pacing.chunk_seconds == pytest.approx(5 * 0.1 + 0.05)
