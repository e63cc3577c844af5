"""TAEHV: streamed equals parallel equals a frame-by-frame reading of the public algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.decoders import load_decoder, load_taehv
from turboserve.worker.model.load import CheckpointError
from turboserve.worker.model.taehv import Taehv, TaehvConfig, TaehvDecoder

CONFIG = TaehvConfig(latent_channels=6, widths=(16, 12, 8, 8))


@pytest.fixture(scope="module")
def model() -> Taehv:
    torch.manual_seed(2)
    made = Taehv(CONFIG).eval().requires_grad_(False)
    for parameter in made.parameters():
        # With weights at their initial scale, the frames would be almost all alike.
        parameter.mul_(1.6)
    nn.init.constant_(made.get_parameter(f"decoder.{len(made.decoder) - 1}.bias"), 0.5)
    return made


def latents(frames: int) -> Tensor:
    return torch.randn(frames, 6, 4, 6, generator=torch.Generator().manual_seed(frames))


def frame_by_frame(state: dict[str, Tensor], latents: Tensor) -> Tensor:
    """Decode as the authors describe it, from the weights alone: one frame at a time, depth first."""
    grows = {7: 1, 13: 2, 19: 2}
    memory: dict[int, Tensor] = {}
    out = []

    def conv(name: str, x: Tensor) -> Tensor:
        weight = state[f"decoder.{name}.weight"]
        return F.conv2d(x, weight, state.get(f"decoder.{name}.bias"), padding=weight.shape[-1] // 2)

    def visit(index: int, x: Tensor) -> None:
        if index == 23:
            out.append(x.clamp(0, 1))
        elif index == 0:
            visit(1, 3 * torch.tanh(x / 3))
        elif index in (2, 21):
            visit(index + 1, x.relu())
        elif index in (6, 12, 18):
            visit(index + 1, F.interpolate(x, scale_factor=2))
        elif index in grows:
            for part in conv(f"{index}.conv", x).chunk(grows[index], 1):
                visit(index + 1, part)
        elif index in (3, 4, 5, 9, 10, 11, 15, 16, 17):
            past, memory[index] = memory.get(index, torch.zeros_like(x)), x
            h = conv(f"{index}.conv.0", torch.cat([x, past], 1)).relu()
            h = conv(f"{index}.conv.2", h).relu()
            visit(index + 1, (conv(f"{index}.conv.4", h) + x).relu())
        else:
            visit(index + 1, conv(str(index), x))

    for latent in latents:
        visit(0, latent.unsqueeze(0))
    return torch.cat(out)[3:]


@pytest.mark.parametrize("parts", [(7,), (3, 3, 1), (1, 1, 1, 1, 1, 1, 1)])
def test_a_stream_equals_the_parallel_and_the_frame_by_frame_result(
    model: Taehv, parts: tuple[int, ...]
) -> None:
    expected = frame_by_frame(dict(model.state_dict()), latents(7))
    assert expected.shape == (25, 3, 32, 48)
    assert expected.std() > 0.01
    caches, frames = None, []
    for part in latents(7).split(parts):
        out, caches = model.decode(part.unsqueeze(0), caches)
        frames.append(out[0])
    assert (torch.cat(frames) - expected).abs().max() < 1e-5


def test_the_state_is_the_session_s(model: Taehv) -> None:
    whole, _ = model.decode(latents(6).unsqueeze(0))
    _, [cache] = model.decode(latents(6)[None, :3])
    _, other = model.decode(-latents(6)[None, :3])
    suspended = load(save(cache))
    model.decode(latents(3).unsqueeze(0), other)
    resumed, _ = model.decode(latents(6)[None, 3:], [suspended])
    assert (resumed - whole[:, 9:]).abs().max() < 1e-5
    decoder = TaehvDecoder(model, 4, 6)
    assert decoder.cache_bytes == sum(t.numel() * t.element_size() for t in cache.values())


def test_bfloat16_stays_near_float32(model: Taehv) -> None:
    half = load_taehv({name: t.bfloat16() for name, t in model.state_dict().items()}, CONFIG)
    exact, _ = TaehvDecoder(model, 4, 6).decode(latents(3).unsqueeze(0), None)
    found, _ = TaehvDecoder(half, 4, 6).decode(latents(3).unsqueeze(0), None)
    assert (found.float() - exact.float()).abs().mean() < 2


def test_bytes_of_the_public_model_s_state_are_the_facts() -> None:
    with torch.device("meta"):
        model = Taehv(TaehvConfig())
    assert model.cache_numbers(60, 104) * 2 == 67_092_480


def test_the_decoder_gives_pixels(model: Taehv) -> None:
    decoder = TaehvDecoder(model, 4, 6, frames_at_once=2)
    [first], caches = decoder.decode(latents(3).unsqueeze(0), None)
    [after], _ = decoder.decode(latents(2).unsqueeze(0), caches)
    assert first.dtype is torch.uint8
    assert first.shape == (9, 32, 48, 3)
    assert after.shape == (8, 32, 48, 3)
    expected = model.decode(latents(3).unsqueeze(0))[0][0].movedim(1, -1) * 255
    assert (first.float() - expected).abs().max() < 0.51


def test_public_files_load_strictly(tmp_path: Path, model: Taehv) -> None:
    config = ModelConfig(48, 96, 2, 1, 12, 5, 4, 6, in_dim=6, out_dim=6)
    state = {**model.state_dict(), "encoder.0.weight": torch.zeros(1)}
    torch.save(state, tmp_path / "taew2_1.pth")
    save_file(state, tmp_path / "taew2_1.safetensors")
    expected, _ = TaehvDecoder(model, 4, 6).decode(latents(3).unsqueeze(0), None)
    for name in ("taew2_1.pth", "taew2_1.safetensors"):
        decoder = load_decoder(tmp_path / name, config, sizes=CONFIG)
        assert torch.equal(decoder.decode(latents(3).unsqueeze(0), None)[0], expected)
    del state["decoder.4.conv.2.bias"]
    with pytest.raises(CheckpointError) as caught:
        load_taehv(state, CONFIG)
    assert caught.value.missing == ["decoder.4.conv.2.bias"]


def test_weights_that_double_time_at_every_level_serve_one_that_does_not(model: Taehv) -> None:
    # The public loader takes the last frame's channels of a growing layer.
    state = dict(model.state_dict())
    small = state["decoder.7.conv.weight"]
    state["decoder.7.conv.weight"] = torch.cat((small + 1, small))
    assert torch.equal(load_taehv(state, CONFIG).get_parameter("decoder.7.conv.weight"), small)
