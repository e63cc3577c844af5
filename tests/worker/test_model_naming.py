"""Names of public checkpoints: both ways, and against diffusers' own converter and its own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import SlabLayout, SlabPool
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.work import Row, RowsForward
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.naming import DIFFUSERS_TRANSFORMER, renamed, transformer_names
from turboserve.worker.model.presets import preset
from turboserve.worker.model.transformer import CausalWanTransformer

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel


@pytest.fixture
def weights(tiny_config: ModelConfig, make_models: Callable[..., Models]) -> dict[str, Tensor]:
    return dict(make_models(tiny_config).transformer.state_dict())


def library(config: ModelConfig) -> WanTransformer3DModel:
    # Takes seconds, so that only the process that runs this test imports it.
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=config.patch_size,
        num_attention_heads=config.num_heads,
        attention_head_dim=config.head_dim,
        in_channels=config.in_dim,
        out_channels=config.out_dim,
        text_dim=config.text_dim,
        freq_dim=config.freq_dim,
        ffn_dim=config.ffn_dim,
        num_layers=config.num_layers,
        cross_attn_norm=True,
        eps=config.eps,
    )


def test_a_round_trip_through_diffusers_names(weights: dict[str, Tensor]) -> None:
    theirs = renamed(weights, DIFFUSERS_TRANSFORMER.back)
    assert "blocks.1.attn2.to_out.0.bias" in theirs
    assert "blocks.0.norm2.weight" in theirs
    assert {"scale_shift_table", "blocks.0.scale_shift_table", "patch_embedding.weight"} <= theirs.keys()
    back = transformer_names(theirs)
    assert back.keys() == weights.keys()
    assert all(back[name] is weights[name] for name in weights)
    assert transformer_names(weights).keys() == weights.keys()


def test_the_names_are_those_that_diffusers_converts(weights: dict[str, Tensor]) -> None:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    converted = convert_wan_transformer_to_diffusers(dict(weights))
    ours = renamed(weights, DIFFUSERS_TRANSFORMER.back)
    assert converted.keys() == ours.keys()
    assert all(converted[name] is ours[name] for name in ours)


def test_every_name_and_shape_of_the_public_model() -> None:
    config = preset("self-forcing-1-3b")
    with torch.device("meta"):
        theirs = library(config).state_dict()
        ours = CausalWanTransformer(config).state_dict()
    mapped = transformer_names(theirs)
    assert {n: t.shape for n, t in mapped.items()} == {n: t.shape for n, t in ours.items()}
    assert sum(t.numel() for t in ours.values()) == 1_418_996_800


def test_unknown_names_pass_unchanged_for_the_loader_to_list() -> None:
    assert DIFFUSERS_TRANSFORMER.there("blocks.0.attn1.add_k_proj.weight") == (
        "blocks.0.attn1.add_k_proj.weight"
    )
    assert DIFFUSERS_TRANSFORMER.there("blocks.0.attn1.to_q.lora") == "blocks.0.attn1.to_q.lora"


@torch.inference_mode()
def test_diffusers_computes_the_same_flow_with_the_same_weights(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    """The flow of a session's first chunk: there, causal attention over chunks covers all frames."""
    config = tiny_config
    model = make_models(config).transformer
    theirs = library(config).eval()
    theirs.load_state_dict(renamed(dict(model.state_dict()), DIFFUSERS_TRANSFORMER.back))
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(3, config.in_dim, config.latent_height, config.latent_width, generator=generator)
    text = torch.randn(1, config.text_len, config.text_dim, generator=generator)
    expected = theirs(latents.transpose(0, 1).unsqueeze(0), torch.tensor([625]), text).sample
    layout = SlabLayout.of(config, torch.float32)
    ring = KVRing(SlabPool(layout, layout.total_bytes, torch.device("cpu")).acquire(), config, model.rotation)
    ring.set_text(model.project_text(text), row=0)
    row = Row(ring, ring.place(0, 3), latents, 625.0, 0)
    (found,) = RowsForward(model)([row])
    assert found.std() > 0.1
    assert (found.transpose(0, 1) - expected[0]).abs().max() < 1e-4
