"""The Wan VAE's decoder: streamed equals diffusers' whole clip; files under both public namings."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from turboserve.worker.model.config import ModelConfig, ModelConfigError
from turboserve.worker.model.decoders import load_decoder, load_wan_vae
from turboserve.worker.model.load import CheckpointError
from turboserve.worker.model.naming import renamed, wan_vae
from turboserve.worker.model.wan_vae import WanDecoder, WanVae
from turboserve.worker.model.wan_vae_config import WanVaeConfig

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

LATENT = (4, 6)


def sizes(**changes: Any) -> WanVaeConfig:
    generator = torch.Generator().manual_seed(1)
    values: dict[str, Any] = {
        "base_dim": 4,
        "z_dim": 6,
        "dim_mult": (1, 2, 4, 4),
        "res_blocks": 2,
        "latents_mean": tuple(torch.randn(6, generator=generator).tolist()),
        "latents_std": tuple((torch.rand(6, generator=generator) + 0.5).tolist()),
    }
    return WanVaeConfig(**{**values, **changes})


def library(config: WanVaeConfig) -> AutoencoderKLWan:
    # Takes seconds, so that only the process that runs this test imports it.
    from diffusers import AutoencoderKLWan

    torch.manual_seed(3)
    made = AutoencoderKLWan(
        base_dim=config.base_dim,
        decoder_base_dim=config.decoder_base_dim,
        z_dim=config.z_dim,
        dim_mult=list(config.dim_mult),
        num_res_blocks=config.res_blocks,
        temperal_downsample=list(config.temporal_downsample),
        latents_mean=list(config.latents_mean),
        latents_std=list(config.latents_std),
    )
    for name, parameter in made.named_parameters():
        # With weights at their initial scale, the frames would be almost all alike.
        torch.nn.init.normal_(parameter, 1.0 if name.endswith("gamma") else 0.0, 0.15)
    return made.eval().requires_grad_(False)


def latents(frames: int) -> Tensor:
    return torch.randn(frames, 6, *LATENT, generator=torch.Generator().manual_seed(frames))


def whole(made: AutoencoderKLWan, raw: Tensor) -> Tensor:
    """Decode a whole clip with the library: [N, 3, H, W]."""
    frames: Tensor = made.decode(raw.transpose(0, 1).unsqueeze(0)).sample[0].transpose(0, 1)
    return frames


@pytest.fixture(scope="module")
def made() -> AutoencoderKLWan:
    return library(sizes())


@pytest.fixture(scope="module")
def ours(made: AutoencoderKLWan) -> WanVae:
    return load_wan_vae(dict(made.state_dict()), sizes())


@pytest.fixture
def transformer_config() -> ModelConfig:
    return ModelConfig(
        dim=48,
        ffn_dim=96,
        num_heads=2,
        num_layers=1,
        text_dim=12,
        text_len=5,
        in_dim=6,
        out_dim=6,
        latent_height=LATENT[0],
        latent_width=LATENT[1],
    )


@pytest.mark.parametrize("parts", [(7,), (3, 3, 1), (1, 2, 4), (1, 1, 1, 1, 1, 1, 1)])
def test_a_stream_equals_the_library_s_whole_clip(
    made: AutoencoderKLWan, ours: WanVae, parts: tuple[int, ...]
) -> None:
    expected = whole(made, latents(7))
    assert expected.shape == (25, 3, 32, 48)
    assert expected.std() > 0.05
    caches, frames = None, []
    for part in latents(7).split(parts):
        out, caches = ours.decode(part.unsqueeze(0), caches)
        frames.append(out[0])
    assert [len(f) for f in frames] == [4 * p - (3 if i == 0 else 0) for i, p in enumerate(parts)]
    assert (torch.cat(frames) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"decoder_base_dim": 6},
        {"res_blocks": 1, "temporal_downsample": (True, True, False)},
        {"dim_mult": (1, 2, 2), "temporal_downsample": (True, True)},
    ],
)
def test_other_sizes(changes: dict[str, Any]) -> None:
    config = sizes(**changes)
    made = library(config)
    frames, _ = load_wan_vae(dict(made.state_dict()), config).decode(latents(3).unsqueeze(0))
    assert (frames[0] - whole(made, latents(3))).abs().max() < 1e-4


def test_the_cache_travels_with_the_session_and_the_module_keeps_nothing(
    made: AutoencoderKLWan, ours: WanVae
) -> None:
    expected = whole(made, latents(6))
    _, [cache] = ours.decode(latents(6)[None, :3])
    _, other = ours.decode(-latents(6)[None, :3])
    kept = {name: tensor.clone() for name, tensor in cache.items()}
    suspended = load(io.BytesIO(save(cache)).read())
    ours.decode(latents(3).unsqueeze(0), other)
    ours.decode(latents(3).unsqueeze(0), [cache])
    assert all(torch.equal(cache[name], kept[name]) for name in kept)
    resumed, _ = ours.decode(latents(6)[None, 3:], [suspended])
    assert (resumed[0] - expected[9:]).abs().max() < 1e-4
    assert not dict(ours.named_buffers())


def test_the_decoder_gives_pixels_of_normalised_latents(made: AutoencoderKLWan, ours: WanVae) -> None:
    config = sizes()
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (config.latents_mean, config.latents_std))
    decoder = WanDecoder(ours, *LATENT)
    [frames], [cache] = decoder.decode(((latents(3) - mean) / std).unsqueeze(0), None)
    assert frames.dtype is torch.uint8
    assert frames.shape == (9, 32, 48, 3)
    expected = (whole(made, latents(3)).movedim(1, -1) + 1) * 127.5
    assert (frames.float() - expected).abs().max() < 0.51
    assert decoder.cache_bytes == sum(t.numel() * t.element_size() for t in cache.values())


def test_bfloat16_stays_near_float32(made: AutoencoderKLWan, ours: WanVae) -> None:
    half = load_wan_vae({name: t.bfloat16() for name, t in made.state_dict().items()}, sizes())
    exact, _ = ours.decode(latents(3).unsqueeze(0))
    found, [cache] = half.decode(latents(3).bfloat16().unsqueeze(0))
    assert found.dtype is torch.bfloat16
    assert {t.dtype for t in cache.values()} == {torch.bfloat16}
    assert (found.float() - exact).abs().mean() < 0.05


def test_bytes_of_the_public_model_s_cache_are_the_facts() -> None:
    with torch.device("meta"):
        vae = WanVae(WanVaeConfig())
    assert vae.cache_numbers(60, 104) * 2 == 1_888_573_440


def test_the_original_names_are_those_that_diffusers_converts(made: AutoencoderKLWan) -> None:
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    names = wan_vae(levels=4, res_blocks=2)
    state = {n: t for n, t in made.state_dict().items() if n.startswith(("decoder.", "post_quant_conv."))}
    original = renamed(state, names.back)
    assert not original.keys() & state.keys() - {"decoder.conv_in.weight"}
    assert {"conv2.weight", "decoder.middle.0.residual.0.gamma", "decoder.upsamples.3.time_conv.bias"} <= (
        original.keys()
    )
    assert {"decoder.upsamples.4.shortcut.weight", "decoder.upsamples.14.residual.6.bias"} <= original.keys()
    assert renamed(original, names.there).keys() == state.keys()
    converted = convert_wan_vae_to_diffusers(dict(original))
    assert converted.keys() == state.keys()
    assert all(converted[name] is state[name] for name in state)


@pytest.fixture
def files(tmp_path: Path, made: AutoencoderKLWan) -> dict[str, Path]:
    made.save_pretrained(tmp_path / "model" / "vae")
    names = wan_vae(levels=4, res_blocks=2)
    original = renamed(dict(made.state_dict()), names.back)
    original["encoder.conv1.weight"] = torch.zeros(1)
    original["conv1.weight"] = torch.zeros(1)
    torch.save(original, tmp_path / "Wan2.1_VAE.pth")
    return {
        "root": tmp_path / "model",
        "folder": tmp_path / "model" / "vae",
        "file": tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors",
        "original": tmp_path / "Wan2.1_VAE.pth",
    }


def test_every_public_file_gives_the_same_decoder(
    files: dict[str, Path], transformer_config: ModelConfig, ours: WanVae
) -> None:
    expected, _ = WanDecoder(ours, *LATENT).decode(latents(3).unsqueeze(0), None)
    for name, path in files.items():
        given = sizes() if name == "original" else None
        decoder = load_decoder(path, transformer_config, sizes=given)
        assert torch.equal(decoder.decode(latents(3).unsqueeze(0), None)[0], expected), name


def test_what_does_not_fit_is_listed(made: AutoencoderKLWan) -> None:
    state = dict(made.state_dict())
    del state["decoder.norm_out.gamma"]
    state["decoder.conv_in.bias"] = torch.zeros(2)
    state["decoder.another"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        load_wan_vae(state, sizes())
    assert caught.value.missing == ["decoder.norm_out.gamma"]
    assert caught.value.extra == ["decoder.another"]
    assert caught.value.misshaped == [("decoder.conv_in.bias", (2,), (16,))]


def test_another_architecture_is_refused(files: dict[str, Path], transformer_config: ModelConfig) -> None:
    file = files["folder"] / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "is_residual": True}))
    with pytest.raises(ModelConfigError, match="vae is_residual: True must be False"):
        load_decoder(files["folder"], transformer_config)
    with pytest.raises(ModelConfigError, match=r"latents_mean: length 6, must be z_dim \(7\)"):
        sizes(z_dim=7)
    with pytest.raises(ModelConfigError, match="temperal_downsample: length 2"):
        sizes(temporal_downsample=(True, False))
