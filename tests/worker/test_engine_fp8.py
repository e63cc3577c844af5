"""Attention in FP8: the arithmetic of its kernel, computed in float32, and what a device lacks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from turboserve.worker.engine.errors import AttentionUnavailableError
from turboserve.worker.engine.fp8_attention import descale_of, fp8_attention, reference_kernel, rounded
from turboserve.worker.engine.fp8_rounding import FP8, LARGEST
from turboserve.worker.engine.golden import check_type
from turboserve.worker.engine.kv_ring import attention
from turboserve.worker.engine.sparse_attention import sparse_attention
from turboserve.worker.engine.work import RowsMemory

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
in_fp8 = partial(fp8_attention, kernel=reference_kernel)


def error(found: Tensor, exact: Tensor) -> float:
    """Relative error."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def tokens(count: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(1, count, 3, 16, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_rounding_keeps_three_bits_at_any_scale(scale: float) -> None:
    exact = tokens(40, scale).transpose(1, 2)
    descale = descale_of(exact)
    numbers = rounded(exact, descale).numbers
    assert numbers.dtype == FP8
    assert LARGEST / 2 < numbers.float().abs().max() <= LARGEST
    # A power of two: scaling itself rounds nothing.
    assert torch.frexp(descale).mantissa.item() == 0.5
    assert 1e-3 < error(numbers.float() * descale, exact) < 2**-4


def test_numbers_outside_the_range_become_its_ends() -> None:
    one = torch.ones(1, 1, 1, 1)
    exact = torch.tensor([-1e9, -449.0, 0.0, 500.0, 1e9]).view(1, 1, 1, 5)
    assert rounded(exact, one).numbers.float().flatten().tolist() == [-448, -448, 0, 448, 448]
    assert not rounded(torch.zeros(1, 1, 4, 16), descale_of(torch.zeros(1, 1, 4, 16))).numbers.float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_near_the_exact_one_and_of_its_type(dtype: torch.dtype) -> None:
    q, k, v = (tokens(count).to(dtype) for count in (12, 90, 91))
    k, v = k.transpose(1, 2), v[:, :90].transpose(1, 2)
    exact, found = attention(q, k, v), in_fp8(q, k, v)
    assert (found.dtype, found.shape) == (exact.dtype, exact.shape)
    assert 1e-3 < error(found, exact) < 0.15
    # Equal values average to themselves, up to the rounding of the weights and of the result.
    assert torch.allclose(in_fp8(q, k, torch.full_like(v, 448.0)), torch.full_like(q, 448.0), rtol=0.07)


def test_sparse_attention_is_rounded_too() -> None:
    q, k, v = tokens(8), tokens(32).transpose(1, 2), tokens(32).transpose(1, 2)
    exact = sparse_attention(q, k, v, 0.5, 8, attention)
    found = sparse_attention(q, k, v, 0.5, 8, in_fp8)
    assert 1e-3 < error(found, exact) < 0.15


def test_a_reference_comes_out_near_when_its_forwards_are_rounded() -> None:
    memory = partial(RowsMemory, by=in_fp8)
    report = check_type(GOLDEN / "longlive_switch.safetensors", torch.float32, 0.5, memory=memory)
    assert report.passed
    assert report.max_abs_error > 1e-3


def test_a_device_without_it_is_refused_at_the_start(make_driver: Callable[..., Any]) -> None:
    with pytest.raises(AttentionUnavailableError, match=r"fp8: cpu is no GPU of compute capability 9\.0"):
        make_driver(attention="fp8")
