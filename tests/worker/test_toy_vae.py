"""The VAE: causal, streamed equals whole, and all of its memory in the cache that the caller keeps."""

from __future__ import annotations

import io

import pytest
import torch
from safetensors.torch import load, save

from turboserve.worker.model.toy_vae import ToyVae

PICTURE = {"channels": 8, "frame_channels": 8, "landscapes": 4, "size": 128}


@pytest.fixture(scope="module", params=[None, PICTURE], ids=["plain", "picture"])
def vae(request: pytest.FixtureRequest) -> ToyVae:
    torch.manual_seed(0)
    made = ToyVae(width=16, depth=2, picture=request.param).eval().requires_grad_(False)
    made.latent_mean.normal_()
    made.latent_std.uniform_(0.5, 2.0)
    return made


def latents(frames: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, frames, 16, 8, 8, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize("parts", [(3, 3, 3), (1, 2, 6), (9,), (1, 1, 1, 1, 1, 1, 1, 1, 1)])
def test_a_stream_equals_the_whole(vae: ToyVae, parts: tuple[int, ...]) -> None:
    whole, _ = vae.decode(latents(9))
    cache, made = None, []
    for part in latents(9).split(parts, 1):
        frames, cache = vae.decode(part, cache)
        made.append(frames)
    side = 64 if isinstance(vae.decoder_out, torch.nn.Conv2d) else 128
    assert whole.shape == (2, 1 + 4 * 8, 3, side, side)
    assert torch.allclose(torch.cat(made, 1), whole, atol=1e-5)


def test_the_first_latent_frame_gives_one_frame_and_each_other_four(vae: ToyVae) -> None:
    frames, cache = vae.decode(latents(3))
    assert frames.shape[1] == 9
    frames, _ = vae.decode(latents(3), cache)
    assert frames.shape[1] == 12


def test_a_frame_depends_on_earlier_latents_only(vae: ToyVae) -> None:
    x = latents(4)
    changed = x.clone()
    changed[:, 3] += 1.0
    before, after = vae.decode(x)[0], vae.decode(changed)[0]
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_sessions_are_separate_and_the_cache_can_travel(vae: ToyVae) -> None:
    first, second = latents(3, 1), latents(6, 1)[:, 3:]
    _, mine = vae.decode(first)
    _, other = vae.decode(-first)
    expected, _ = vae.decode(second, mine)
    copied = load(io.BytesIO(save(mine)).read())
    vae.decode(second, other)
    again, _ = vae.decode(second, copied)
    assert torch.equal(expected, again)
    assert sum(tensor.numel() for tensor in mine.values()) == vae.cache_numbers(64)


def test_decoding_leaves_the_given_cache_as_it_was(vae: ToyVae) -> None:
    _, cache = vae.decode(latents(3))
    kept = {name: tensor.clone() for name, tensor in cache.items()}
    vae.decode(latents(3), cache)
    assert all(torch.equal(cache[name], kept[name]) for name in kept)


def test_encoding_is_causal_and_eight_times_smaller(vae: ToyVae) -> None:
    frames = torch.rand(1, 17, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    whole = vae.encode(frames)
    assert whole.shape == (1, 5, 16, 8, 8)
    assert torch.allclose(vae.encode(frames[:, :9]), whole[:, :3], atol=1e-5)


def test_a_shifted_world_has_shifted_latents(vae: ToyVae) -> None:
    frames = torch.rand(1, 5, 3, 64, 64, generator=torch.Generator().manual_seed(2)) * 2 - 1
    moved = vae.encode(frames.roll((8, -16), (3, 4)))
    assert torch.allclose(moved, vae.encode(frames).roll((1, -2), (3, 4)), atol=1e-5)


def test_a_wrong_number_of_frames_is_refused(vae: ToyVae) -> None:
    with pytest.raises(ValueError, match=r"frames: 8 is not 1 \+ 4"):
        vae.encode(torch.zeros(1, 8, 3, 64, 64))
