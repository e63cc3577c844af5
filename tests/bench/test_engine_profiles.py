"""`turboserve profile engine` measures any model, and a worker of that model starts with its file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from turboserve.bench.engine.models import random_models
from turboserve.cli.main import app
from turboserve.worker.engine.profile_file import STAGES, ProfileFile
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.taehv import TaehvConfig
from turboserve.worker.service.models import make_engine
from turboserve.worker.settings import Settings

pytestmark = pytest.mark.measures

RUNNER = CliRunner()
SIZES = {
    "dim": 48, "ffn_dim": 96, "num_heads": 2, "num_layers": 2, "text_dim": 12, "text_len": 5,
    "latent_height": 4, "latent_width": 4, "freq_dim": 32, "local_attn_size": 6, "sink_size": 3,
}  # fmt: skip


def test_any_sizes_are_measured_with_random_weights_and_loaded_by_a_worker(tmp_path: Path) -> None:
    sizes, out = tmp_path / "sizes.json", tmp_path / "profile.json"
    sizes.write_text(json.dumps(SIZES))
    options = ["--config", str(sizes), "--out", str(out), "--batch", "3", "--repeats", "3"]
    result = RUNNER.invoke(app, ["profile", "engine", *options, "--decoder", "taehv"])
    assert result.exit_code == 0, result.output
    config = ModelConfig.from_mapping(SIZES)
    found = ProfileFile.read(out, model=fingerprint(config), device="cpu")
    # The text encoder is unknown here. Recaches are gathered up to a batch's tokens, of two chunks each.
    assert [(stage, list(found.stages[stage])) for stage in STAGES if stage in found.stages] == [
        ("recache", [1]),
        ("forward", [1, 2, 3]),
        ("decode", [1, 2, 3]),
        ("package", [1]),
    ]
    import torch

    tiny = TaehvConfig(widths=(16, 8, 8, 8))
    models = random_models(config, tiny, torch.device("cpu"), torch.float32)
    engine = make_engine(models, Settings(profile=out, worker_max_sessions=1, host_memory_bytes=0))
    assert engine.forward.profile(3) == found.stages["forward"][3]
    assert engine.package(1) == found.stages["package"][1]


def test_the_shipped_model_is_measured_with_its_text_encoder(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    result = RUNNER.invoke(app, ["profile", "engine", "--out", str(out), "--batch", "1", "--repeats", "3"])
    assert result.exit_code == 0, result.output
    assert list(json.loads(out.read_text())["stages"]) == list(STAGES)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "nope"], "'nope' is not one of self-forcing-1-3b"),
        (["--model", "longlive-1-3b"], "TURBOSERVE_CHECKPOINT: model longlive-1-3b needs it"),
        (["--config", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_what_cannot_be_measured_says_why(tmp_path: Path, options: list[str], said: str) -> None:
    result = RUNNER.invoke(app, ["profile", "engine", "--out", str(tmp_path / "x"), *options])
    assert result.exit_code == 1
    assert said in result.output
    assert not (tmp_path / "x").exists()
