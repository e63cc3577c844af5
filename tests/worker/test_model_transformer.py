"""The transformer beyond the checks of the reference files: schedule, gradients, types, mixed rows."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.presets import preset
from turboserve.worker.model.rope import Rotation, rotate
from turboserve.worker.model.schedule import Schedule, add_noise, to_clean
from turboserve.worker.model.transformer import CausalWanTransformer


class NoMemory:
    """Every row attends only to itself and its prompt."""

    def __init__(self, text: list[tuple[Tensor, Tensor]]) -> None:
        self._text = text

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention(q, k, v)

    def attend_text(self, layer: int, q: Tensor) -> Tensor:
        return self._attention(q, *self._text[layer])

    @staticmethod
    def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def test_the_steps_are_warped_as_the_facts_say() -> None:
    schedule = Schedule(preset("longlive-1-3b"))
    assert schedule.steps == pytest.approx((1000.0, 937.5, 833.33, 625.0), abs=0.01)
    assert schedule.step_sigmas == pytest.approx((1.0, 0.9375, 0.83333, 0.625), abs=1e-5)
    assert schedule.sigmas.shape == (1000,)
    assert float(schedule.sigma_of(torch.tensor(700.0))) == pytest.approx(0.7, abs=2e-3)


def test_noise_and_clean_are_inverse() -> None:
    x0, noise = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    for sigma in (1.0, 0.625, 0.1):
        noisy = add_noise(x0, noise, sigma)
        assert torch.allclose(to_clean(noisy, noise - x0, sigma), x0, atol=1e-6)


def test_rotation_is_relative_and_exact_far_out(tiny_config: ModelConfig) -> None:
    rotation = Rotation(tiny_config)
    tokens, heads, width = tiny_config.tokens_per_frame, tiny_config.num_heads, tiny_config.head_dim
    q, k = torch.randn(2, 1, tokens, heads, width)

    def score(query_frame: int, key_frame: int) -> Tensor:
        at_query, at_key = (rotation.at(torch.tensor([[frame]])) for frame in (query_frame, key_frame))
        return torch.einsum("bshd,bthd->bhst", rotate(q, at_query), rotate(k, at_key))

    assert torch.allclose(score(5, 2), score(100_005, 100_002), atol=1e-5)
    assert not torch.allclose(score(5, 2), score(5, 3), atol=1e-2)
    later = rotate(rotate(k, rotation.at(torch.tensor([[2]]))), rotation.by_frames(7, torch.device("cpu")))
    assert torch.allclose(later, rotate(k, rotation.at(torch.tensor([[9]]))), atol=1e-5)


def test_gradients_reach_every_parameter(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    model = make_models(tiny_config).transformer.requires_grad_(True).train()
    memory = NoMemory(model.project_text(torch.randn(2, 3, tiny_config.text_dim)))
    latents = torch.randn(2, *tiny_config.latent_shape)
    times = torch.rand(2, 3) * 1000
    model(latents, times, torch.arange(6).view(2, 3), memory).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_rows_may_differ_in_timestep_frame_and_prompt(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    model = make_models(tiny_config).transformer
    latents = torch.randn(3, *tiny_config.latent_shape)
    text = torch.randn(3, 4, tiny_config.text_dim)
    times = torch.tensor([[1000.0, 1000.0, 1000.0], [0.0, 625.0, 300.0], [937.5] * 3])
    index = torch.tensor([[0, 1, 2], [30, 31, 32], [999, 1000, 1001]])
    together = model(latents, times, index, NoMemory(model.project_text(text)))
    for i in range(3):
        row = slice(i, i + 1)
        alone = model(latents[row], times[row], index[row], NoMemory(model.project_text(text[row])))
        assert torch.allclose(together[row], alone, atol=1e-5)


def test_bfloat16_in_and_out(tiny_config: ModelConfig, make_models: Callable[..., Models]) -> None:
    exact = make_models(tiny_config).transformer
    coarse = make_models(tiny_config).transformer.to(torch.bfloat16)
    latents = torch.randn(1, *tiny_config.latent_shape)
    text = torch.randn(1, 5, tiny_config.text_dim)
    times, index = torch.full((1, 3), 937.5), torch.arange(3).view(1, 3)

    def flow(model: CausalWanTransformer, dtype: torch.dtype) -> Tensor:
        found: Tensor = model(latents.to(dtype), times, index, NoMemory(model.project_text(text.to(dtype))))
        assert found.dtype == dtype
        return found.float()

    wanted = flow(exact, torch.float32)
    assert (flow(coarse, torch.bfloat16) - wanted).abs().mean() < 0.02 * wanted.abs().mean() + 0.01


def test_prompts_longer_than_the_model_takes_are_refused(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    model = make_models(tiny_config).transformer
    with pytest.raises(ValueError, match="6 tokens exceed the model's text_len of 5"):
        model.project_text(torch.zeros(1, 6, tiny_config.text_dim))


def test_only_learned_positions_tell_a_patch_where_it_is(
    tiny_config: ModelConfig, make_models: Callable[..., Models]
) -> None:
    """Rotation is relative: in a frame whose patches are all alike, every patch has the same flow."""
    alike = torch.randn(1, 1, tiny_config.in_dim, 1, 1).expand(1, *tiny_config.latent_shape).contiguous()

    def spread(config: ModelConfig) -> float:
        model = make_models(config).transformer
        if config.learned_positions:
            torch.nn.init.normal_(model.position_embedding)
        memory = NoMemory(model.project_text(torch.randn(1, 3, config.text_dim)))
        flow = model(alike, torch.full((1, 3), 500.0), torch.arange(3)[None], memory)
        _, high, wide = config.patch_size
        return float((flow - flow[..., :high, :wide].repeat(1, 1, 1, *config.grid)).detach().abs().max())

    assert spread(tiny_config) < 1e-5
    assert spread(dataclasses.replace(tiny_config, learned_positions=True)) > 1e-2
