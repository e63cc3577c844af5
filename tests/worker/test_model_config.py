"""Model configurations: sizes that follow from others, limits, presets."""

import dataclasses
from typing import Any

import pytest
import torch

from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.model.config import ModelConfig, ModelConfigError
from turboserve.worker.model.presets import SHIPPED, UnknownPresetError, preset
from turboserve.worker.replicas.models import ModelOptions, load_model


def test_the_public_models_sizes_are_the_facts() -> None:
    config = preset("longlive-1-3b")
    assert config.tokens_per_frame == 1560
    assert config.head_dim == 128
    layout = SlabLayout.of(config, torch.bfloat16)
    assert layout.self_bytes == 3_450_470_400
    assert layout.text_bytes == 94_371_840
    assert SlabLayout.of(preset("self-forcing-1-3b"), torch.bfloat16).self_bytes == 6_038_323_200


def test_media_time_of_chunks() -> None:
    config = preset("longlive-1-3b")
    assert [config.pixel_frames(chunk) for chunk in range(3)] == [9, 12, 12]
    assert [config.media_start(chunk) for chunk in range(3)] == [0.0, 9 / 16, 21 / 16]
    # A session in absolute rotation ends at about 256 s.
    assert config.session_frames == 1024
    assert dataclasses.replace(config, rotation="window").session_frames is None
    assert preset("self-forcing-1-3b").session_frames == 21


def test_json_round_trip() -> None:
    config = preset("longlive-1-3b")
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 1537}, "dim: 1537 must be a multiple of num_heads"),
        ({"num_layers": 0}, "num_layers: 0 must be greater than 0"),
        ({"num_layers": 2.5}, "num_layers: 2.5 is not an integer"),
        ({"num_layers": True}, "num_layers: True is not an integer"),
        ({"patch_size": (2, 2, 2)}, "patch_size: .* 1 in time"),
        ({"latent_height": 61}, "latent_height: 61"),
        ({"local_attn_size": 5}, "local_attn_size: 5 must be at least"),
        ({"denoising_steps": (1000, 0)}, "denoising_steps: 0 must be in"),
        ({"denoising_steps": ()}, "denoising_steps"),
        ({"rotation": "relative"}, "rotation: 'relative'"),
        ({"sink_size": -1}, "sink_size: -1"),
        ({"learned_positions": 1}, "learned_positions: 1 is not true or false"),
    ],
)
def test_values_out_of_range_name_field_and_limit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        dataclasses.replace(preset("longlive-1-3b"), **change)


def test_unknown_and_missing_keys_are_named() -> None:
    values = dataclasses.asdict(preset("longlive-1-3b"))
    with pytest.raises(ModelConfigError, match="unknown keys depth"):
        ModelConfig.from_mapping({**values, "depth": 3})
    assert ModelConfig.from_mapping({**values, "depth": 3}, ignore=frozenset({"depth"})).dim == 1536
    del values["dim"]
    with pytest.raises(ModelConfigError, match="missing keys dim"):
        ModelConfig.from_mapping(values)
    with pytest.raises(ModelConfigError, match="not a JSON object"):
        ModelConfig.from_json("[]")


def test_unknown_presets_are_refused() -> None:
    with pytest.raises(UnknownPresetError, match=r"'wan' is not one of self-forcing-1-3b"):
        preset("wan")


def test_the_live_model_has_chunks_of_one_frame_in_the_same_slabs() -> None:
    whole, live = preset("toyworld"), preset("toyworld-live")
    assert (live.frames_per_chunk, live.sink_size, live.window_frames) == (1, 1, whole.window_frames)
    assert live.chunk_media_s == 0.25
    slabs = [SlabLayout.of(config, torch.float32).self_bytes for config in (whole, live)]
    assert slabs[0] == slabs[1]
    loaded = load_model("toyworld-live", ModelOptions(torch.device("cpu"), torch.float32))
    assert loaded.transformer.config == live
    assert (
        loaded.fingerprint
        != load_model("toyworld", ModelOptions(torch.device("cpu"), torch.float32)).fingerprint
    )


def test_the_small_model_is_another_one_with_the_same_latents() -> None:
    whole, small = preset("toyworld"), preset("toyworld-small")
    assert (small.dim, small.num_heads, small.num_layers) == (128, 4, 4)
    assert (small.latent_height, small.frames_per_chunk) == (whole.latent_height, whole.frames_per_chunk)
    options = ModelOptions(torch.device("cpu"), torch.float32)
    loaded, other = load_model("toyworld-small", options), load_model("toyworld", options)
    assert loaded.transformer.config == small
    assert loaded.fingerprint != other.fingerprint
    assert loaded.controls is not None
    # Both files together stay small enough for a checkout.
    assert sum(path.stat().st_size for path in set(SHIPPED.values())) < 24_000_000
