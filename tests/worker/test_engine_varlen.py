"""Kinds of attention: each gives the same result, in one call for all rows or by a specific kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from turboserve.worker.engine.errors import AttentionUnavailableError
from turboserve.worker.engine.golden import check_type
from turboserve.worker.engine.interface import SessionSpec
from turboserve.worker.engine.varlen import VarlenMemory, require_varlen

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


@pytest.mark.parametrize("name", ["longlive_switch", "self_forcing_global"])
def test_a_reference_comes_out_the_same(name: str) -> None:
    report = check_type(GOLDEN / f"{name}.safetensors", torch.float32, 1e-4, memory=VarlenMemory)
    assert report.passed


@pytest.mark.parametrize("kind", ["varlen", "flash"])
def test_rows_of_different_fill_and_slab_read_their_own_keys(
    make_driver: Callable[..., Any], kind: str
) -> None:
    def chunks(attention: str) -> list[Any]:
        driver = make_driver(slabs=3, max_lead_s=2.0, attention=attention)
        # The rows' slabs, and how full they are, differ: one session is ahead, one slab is elsewhere.
        driver.engine.admit(SessionSpec("gone", "x", 9), driver.now)
        driver.engine.admit(SessionSpec("a", "a red circle", 1), driver.now)
        made: list[Any] = driver.chunks("a", 2)
        driver.engine.evict("gone")
        for name, seed in (("b", 2), ("c", 3)):
            driver.engine.admit(SessionSpec(name, f"prompt of {name}", seed), driver.now)
        return made + [event for event in driver.run() if hasattr(event, "latents")]

    apart, together = chunks("rows"), chunks(kind)
    assert [(c.session, c.index) for c in together] == [(c.session, c.index) for c in apart]
    for ours, theirs in zip(together, apart, strict=True):
        assert torch.allclose(ours.latents, theirs.latents, atol=1e-4)


def test_a_gpu_does_it_in_half_precision_alone() -> None:
    require_varlen(torch.device("cuda"), torch.bfloat16)
    require_varlen(torch.device("cpu"), torch.float32)
    with pytest.raises(AttentionUnavailableError, match=r"varlen: torch\.float32"):
        require_varlen(torch.device("cuda"), torch.float32)


def test_what_a_device_lacks_is_refused_at_the_start(make_driver: Callable[..., Any]) -> None:
    with pytest.raises(AttentionUnavailableError, match=r"cudnn: torch\.float32 on cpu"):
        make_driver(attention="cudnn")
    with pytest.raises(AttentionUnavailableError, match="tree: is not one of rows, flash, cudnn, varlen"):
        make_driver(attention="tree")
