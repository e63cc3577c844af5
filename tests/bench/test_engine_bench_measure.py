"""Assumptions of the engine's benchmark: the baseline computes the same, the clock counts only the work."""

import pytest
import torch

from turboserve.bench.engine.measure import Sessions, batches, naive_chunk_s, ring_against_copies
from turboserve.bench.engine.naive import ClonedCache, NaiveLoop, ShiftedCache
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.transformer import CausalWanTransformer

pytestmark = pytest.mark.measures

CONFIG = ModelConfig(
    dim=48,
    ffn_dim=96,
    num_heads=2,
    num_layers=2,
    text_dim=12,
    text_len=5,
    latent_height=4,
    latent_width=4,
    freq_dim=32,
    local_attn_size=6,
    sink_size=3,
)


def model() -> CausalWanTransformer:
    torch.manual_seed(5)
    made = CausalWanTransformer(CONFIG)
    torch.nn.init.normal_(made.head.head.weight, std=0.2)
    return made.requires_grad_(False).eval()


@pytest.mark.parametrize("cache", [ShiftedCache, ClonedCache])
def test_the_naive_loop_and_the_engine_make_the_same_chunks(cache: type[ShiftedCache]) -> None:
    transformer, text = model(), torch.randn(1, 5, 12)
    noise = torch.randn(6, len(CONFIG.denoising_steps), *CONFIG.latent_shape)
    naive = NaiveLoop(transformer, text, cache)
    sessions = Sessions(transformer, 2, text)
    for chunk in range(6):
        wanted = naive.chunk(noise[chunk])
        for found in sessions.chunk(noise[chunk]):
            assert torch.allclose(found, wanted, atol=1e-4)


def test_memory_is_what_the_formula_says() -> None:
    for count in (1, 3):
        sessions = Sessions(model(), count, torch.randn(1, 5, 12))
        assert sessions.pool.allocated_bytes == sessions.expected_bytes


def test_everything_timed_takes_time() -> None:
    transformer, text = model(), torch.randn(1, 5, 12)
    found = batches(transformer, text, (1, 2), 3)
    assert list(found) == [1, 2]
    assert all(0 < batch.forward_s < batch.chunk_s for batch in found.values())
    assert naive_chunk_s(transformer, text, 3) > 0
    compared = ring_against_copies(transformer, text, 3, ClonedCache)
    assert min(compared.ring_s, compared.copies_s, compared.speedup) > 0
