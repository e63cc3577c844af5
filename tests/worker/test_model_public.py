"""Public files of a whole model, tiny ones, through the worker's own loader to an engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from tests.worker.copied_weights import Copied
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, EngineOptions, Event, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.model import presets
from turboserve.worker.model.config import ModelConfig, ModelConfigError
from turboserve.worker.model.load import CheckpointError, UnreadableCheckpointError, read_checkpoint
from turboserve.worker.model.naming import DIFFUSERS_TRANSFORMER, renamed
from turboserve.worker.model.presets import UnknownPresetError
from turboserve.worker.model.public import PublicFiles, load_transformer
from turboserve.worker.model.taehv import Taehv, TaehvConfig, TaehvDecoder
from turboserve.worker.model.wan_vae import WanDecoder
from turboserve.worker.model.weights import manifest_of
from turboserve.worker.replicas.models import MissingFileError
from turboserve.worker.replicas.public import load_public
from turboserve.worker.service.models import load_models
from turboserve.worker.settings import Settings


@pytest.fixture
def config(tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """Stands in for both public presets, whose own sizes are too large for a test."""
    config = dataclasses.replace(tiny_config, rotation="absolute", text_len=8)
    for name in ("longlive-1-3b", "self-forcing-1-3b"):
        monkeypatch.setitem(presets._PUBLIC, name, config)
    return config


@pytest.fixture
def weights(config: ModelConfig, make_models: Callable[..., Models]) -> dict[str, Tensor]:
    return dict(make_models(config).transformer.state_dict())


@pytest.fixture
def files(tmp_path: Path, config: ModelConfig, weights: dict[str, Tensor]) -> PublicFiles:
    """Files as LongLive publishes them, with the VAE and the text encoder of a diffusers folder."""
    # Take seconds, so that only the process that runs these tests imports them.
    from diffusers import AutoencoderKLWan
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(8)
    raw = {f"model.{name}": tensor for name, tensor in weights.items()}
    torch.save({"generator": raw, "generator_ema": {n: t + 1 for n, t in raw.items()}}, tmp_path / "base.pt")
    lora = {}
    for name, weight in weights.items():
        if name.startswith("blocks.") and weight.ndim == 2:
            key = f"base_model.model.{name.removesuffix('.weight')}"
            lora[f"{key}.lora_A.weight"] = torch.randn(2, weight.shape[1])
            lora[f"{key}.lora_B.weight"] = 0.02 * torch.randn(weight.shape[0], 2)
    torch.save({"generator_lora": lora}, tmp_path / "lora.pt")
    AutoencoderKLWan(base_dim=4).save_pretrained(tmp_path / "wan" / "vae")
    sizes = UMT5Config(
        vocab_size=8, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    UMT5EncoderModel(sizes).save_pretrained(tmp_path / "wan" / "text_encoder")
    words = [("<pad>", 0.0), ("<unk>", -5.0), ("▁red", -1.0), ("▁blue", -1.0)]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(
        tmp_path / "wan" / "tokenizer"
    )
    return PublicFiles(
        checkpoint=tmp_path / "base.pt",
        vae=tmp_path / "wan",
        text_encoder=tmp_path / "wan",
        lora=tmp_path / "lora.pt",
    )


def chunks(engine: Engine, count: int) -> list[ChunkReady]:
    events: list[Event] = []
    for step in range(200):
        events += engine.step(100.0 + step)
        made = [event for event in events if isinstance(event, ChunkReady)]
        if len(made) == count:
            return made
    raise AssertionError(f"only {events}")


def engine_of(loaded: Models) -> Engine:
    layout = SlabLayout.of(loaded.transformer.config, torch.float32)
    return Engine(loaded, EngineOptions(layout.total_bytes, max_lead_s=100.0), clock=lambda: 100.0)


def test_an_engine_makes_video_from_public_files(files: PublicFiles) -> None:
    def run(suspend: bool) -> list[ChunkReady]:
        engine = engine_of(load_public("longlive-1-3b", files))
        engine.admit(SessionSpec("a", "red &amp; blue", seed=3), 100.0)
        made = chunks(engine, 2)
        if suspend:
            engine.suspend("a")
            while "a" in engine.sessions:
                made += [event for event in engine.step(100.0) if isinstance(event, ChunkReady)]
            engine.resume("a", 100.0)
        return made + chunks(engine, 5 - len(made))

    plain, resumed = run(suspend=False), run(suspend=True)
    assert [chunk.frames.shape for chunk in plain[:2]] == [(9, 32, 32, 3), (12, 32, 32, 3)]
    for one, other in zip(plain, resumed, strict=True):
        assert torch.equal(one.latents, other.latents)
        assert torch.equal(one.frames, other.frames)


def test_the_adapter_is_merged_and_the_authors_weights_are_taken(
    config: ModelConfig, files: PublicFiles, weights: dict[str, Tensor]
) -> None:
    name = "blocks.0.ffn.0.weight"
    assert files.lora is not None
    lora = torch.load(files.lora, weights_only=True)["generator_lora"]
    key = "base_model.model.blocks.0.ffn.0"
    delta = lora[f"{key}.lora_B.weight"] @ lora[f"{key}.lora_A.weight"]
    merged = load_public("longlive-1-3b", files).transformer.state_dict()
    assert torch.allclose(merged[name], weights[name] + delta, atol=1e-6)
    assert torch.equal(merged["head.head.weight"], weights["head.head.weight"])

    bare = dataclasses.replace(files, lora=None)
    assert torch.equal(load_public("longlive-1-3b", bare).transformer.state_dict()[name], weights[name])
    averaged = load_public("self-forcing-1-3b", bare).transformer.state_dict()
    assert torch.equal(averaged[name], weights[name] + 1)
    chosen = dataclasses.replace(bare, container="generator")
    assert torch.equal(load_public("self-forcing-1-3b", chosen).transformer.state_dict()[name], weights[name])


def test_a_diffusers_folder_in_shards(
    tmp_path: Path, config: ModelConfig, files: PublicFiles, weights: dict[str, Tensor]
) -> None:
    folder = tmp_path / "diffusers" / "transformer"
    folder.mkdir(parents=True)
    theirs = renamed(weights, DIFFUSERS_TRANSFORMER.back)
    names = sorted(theirs)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: theirs[name].contiguous() for name in held}, folder / file)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    where = {name: file for file, held in parts.items() for name in held}
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))

    given = dataclasses.replace(files, lora=None)
    for path in (tmp_path / "diffusers", folder, index):
        state = load_transformer(config, dataclasses.replace(given, checkpoint=path)).state_dict()
        assert all(torch.equal(state[name], weights[name]) for name in weights)

    moved = {**where, names[0]: "two.safetensors", "absent": "one.safetensors"}
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(index)
    assert caught.value.missing == ["absent"]
    assert caught.value.extra == [f"{names[0]} in one.safetensors"]
    index.write_text("{}")
    with pytest.raises(UnreadableCheckpointError, match="weight_map"):
        read_checkpoint(index)
    index.unlink()
    with pytest.raises(UnreadableCheckpointError, match=r"2 files \*\.safetensors"):
        read_checkpoint(folder)
    with pytest.raises(UnreadableCheckpointError, match=r"nowhere\.pt"):
        read_checkpoint(tmp_path / "nowhere.pt")


def test_a_file_that_disagrees_is_listed_whole(files: PublicFiles) -> None:
    loaded = torch.load(files.checkpoint, weights_only=True)
    del loaded["generator"]["model.head.modulation"]
    loaded["generator"]["model.blocks.5.norm3.weight"] = torch.zeros(1)
    loaded["generator"]["model.patch_embedding.bias"] = torch.zeros(3)
    torch.save(loaded, files.checkpoint)
    with pytest.raises(CheckpointError) as caught:
        load_public("longlive-1-3b", files)
    assert caught.value.missing == ["head.modulation"]
    assert caught.value.extra == ["blocks.5.norm3.weight"]
    assert caught.value.misshaped == [("patch_embedding.bias", (3,), (48,))]


def test_parts_that_do_not_fit_together_are_refused(
    config: ModelConfig, files: PublicFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownPresetError):
        load_public("toyworld", files)
    wide = dataclasses.replace(config, text_dim=16)
    monkeypatch.setitem(presets._PUBLIC, "longlive-1-3b", wide)
    with pytest.raises(ModelConfigError, match=r"width 12 must be the transformer's text_dim \(16\)"):
        load_public("longlive-1-3b", files)
    slow = dataclasses.replace(config, frames_per_latent=8)
    monkeypatch.setitem(presets._PUBLIC, "longlive-1-3b", slow)
    with pytest.raises(ModelConfigError, match="vae frames per latent: 4 must be the transformer's 8"):
        load_public("longlive-1-3b", files)


def test_the_worker_loads_what_its_settings_name(files: PublicFiles, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": "longlive-1-3b",
        "checkpoint": files.checkpoint,
        "lora": files.lora,
        "vae": files.vae,
        "text_encoder": str(files.text_encoder),
        "device": "cpu",
    }
    assert load_models(Settings(**given)).fast_decoder is None
    fast_vae = tmp_path / "taew2_1.pth"
    torch.save(Taehv(TaehvConfig()).state_dict(), fast_vae)
    loaded = load_models(Settings(**given, fast_vae=fast_vae, rotation="window", dtype="bfloat16"))
    assert [type(each) for each in loaded.decoders] == [WanDecoder, TaehvDecoder]
    # So a worker without it, or with another one, gets none of its sessions.
    assert {name.partition(".")[0] for name in loaded.networks} >= {"vae", "fast_vae"}
    assert manifest_of(loaded.networks).digest == loaded.weights
    assert loaded.transformer.config.rotation == "window"
    assert loaded.transformer.patch_embedding.weight.dtype is torch.bfloat16
    assert loaded.text.encode(["red"]).shape == (1, 8, 12)
    for name in ("checkpoint", "vae", "text_encoder"):
        with pytest.raises(
            MissingFileError, match=f"TURBOSERVE_{name.upper()}: model longlive-1-3b needs it"
        ):
            load_models(Settings(**{**given, name: None}))


def test_weights_from_elsewhere_replace_those_of_the_files(files: PublicFiles) -> None:
    loaded = load_public("longlive-1-3b", files)
    # The other worker's checkpoint: the files here have other values.
    other = load_public("self-forcing-1-3b", dataclasses.replace(files, lora=None))
    assert loaded.weights != other.weights
    filled = load_public("longlive-1-3b", files, filler=Copied(other))
    assert filled.weights == other.weights
    assert manifest_of(filled.networks).digest == other.weights
    prompts = ["red and blue"]
    assert torch.equal(filled.text.encode(prompts), other.text.encode(prompts))
