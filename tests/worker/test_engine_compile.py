"""Blocks compiled by torch's compiler give the same chunks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from turboserve.worker.engine import models
from turboserve.worker.engine.interface import SessionSpec
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.rope import Rotation, rotate


def test_real_numbers_turn_as_complex_ones_do(tiny_config: ModelConfig) -> None:
    rotation = Rotation(tiny_config).at(torch.tensor([[3, 700]]))
    x = torch.randn(1, 8, tiny_config.num_heads, tiny_config.head_dim)
    real = rotate(x, torch.view_as_real(rotation))
    assert torch.allclose(real, rotate(x, rotation), atol=1e-6)
    assert not torch.allclose(real, x, atol=0.1)


def test_sessions_together_make_the_chunks_that_they_make_uncompiled(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The trace must be in one piece. The code that a backend generates for its device is not tested here.
    monkeypatch.setattr(models, "COMPILER", "eager")

    def chunks(compile: bool) -> list[Any]:
        driver = make_driver(slabs=2, max_lead_s=1.0, compile=compile)
        for name in "ab":
            driver.engine.admit(SessionSpec(name, f"prompt of {name}", ord(name)), driver.now)
        return [event for event in driver.run() if hasattr(event, "latents")]

    torch._dynamo.utils.counters.clear()
    compiled, plain = chunks(True), chunks(False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    assert [(c.session, c.index) for c in compiled] == [(c.session, c.index) for c in plain]
    for ours, theirs in zip(compiled, plain, strict=True):
        assert torch.allclose(ours.latents, theirs.latents, atol=1e-5)
