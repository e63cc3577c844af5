"""A session at the end of the rotation table: absolute rotation ends there, window-relative continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from turboserve.worker.engine.errors import FramesExhaustedError
from turboserve.worker.engine.interface import ChunkReady, Rebuild, SessionEnded, SessionSpec
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import SlabLayout, SlabPool
from turboserve.worker.engine.work import Row, RowsForward
from turboserve.worker.model.config import ModelConfig, Rotation
from turboserve.worker.model.presets import preset
from turboserve.worker.model.transformer import CausalWanTransformer

LAST = 341
"""Chunk that holds frame 1,023, three frames a chunk; the table has frames 0 … 1,023."""


def with_rotation(config: ModelConfig, rotation: Rotation) -> ModelConfig:
    return dataclasses.replace(config, rotation=rotation)


def near_the_end(driver: Any) -> list[Any]:
    """Return the events of a session that is rebuilt four chunks before the end of the table and plays on."""
    latents = torch.randn(9, 16, 4, 4, generator=torch.Generator().manual_seed(9))
    at = driver.engine.config.media_start(LAST - 3)
    spec = SessionSpec("a", "red", seed=1, rebuild=Rebuild(LAST - 3, latents), playhead_s=at)
    driver.engine.admit(spec, driver.now)
    events: list[Any] = driver.run()
    return events


def test_absolute_rotation_ends_a_session_before_the_table_does(
    tiny_config: ModelConfig, make_driver: Callable[..., Any]
) -> None:
    driver = make_driver(config=with_rotation(tiny_config, "absolute"), max_lead_s=5.0)
    events = near_the_end(driver)
    assert [e.index for e in events if isinstance(e, ChunkReady)] == [LAST - 3, LAST - 2, LAST - 1]
    ended = [e for e in events if isinstance(e, SessionEnded)]
    assert ended == [SessionEnded("a", "frames: 1026 wanted, the model's limit is 1024")]
    ring = driver.engine.sessions["a"].state.ring
    before = list(ring.frames)
    with pytest.raises(FramesExhaustedError, match="1026 wanted, the model's limit is 1024"):
        ring.place(3 * LAST, 3)
    assert ring.frames == before


def test_window_rotation_passes_the_end_of_the_table(
    tiny_config: ModelConfig, make_driver: Callable[..., Any]
) -> None:
    driver = make_driver(config=with_rotation(tiny_config, "window"), max_lead_s=5.0)
    events = near_the_end(driver)
    chunks = [e for e in events if isinstance(e, ChunkReady)]
    assert [c.index for c in chunks] == list(range(LAST - 3, LAST - 3 + len(chunks)))
    assert chunks[-1].index > LAST + 1
    assert not [e for e in events if isinstance(e, SessionEnded)]
    for chunk in chunks:
        assert chunk.latents.isfinite().all()


def window_flow(config: ModelConfig, model: CausalWanTransformer, start: int) -> torch.Tensor:
    """Return the flow of a chunk from frame `start`, after a full window of chunks of the same content."""
    layout = SlabLayout.of(config, torch.float32)
    slab = SlabPool(layout, layout.total_bytes, torch.device("cpu")).acquire()
    ring = KVRing(slab, config, model.rotation)
    generator = torch.Generator().manual_seed(2)
    text = torch.randn(1, config.text_len, config.text_dim, generator=generator)
    ring.set_text(model.project_text(text), row=0)
    flow = torch.empty(0)
    for chunk in range(config.window_frames // config.frames_per_chunk + 1):
        latents = torch.randn(config.latent_shape, generator=generator)
        first = start + chunk * config.frames_per_chunk
        (flow,) = RowsForward(model)([Row(ring, ring.place(first, 3), latents, 625.0, first)])
    return flow


def test_far_from_the_start_a_window_reads_as_near_it(
    tiny_config: ModelConfig, make_models: Callable[..., Any]
) -> None:
    """Rotation is relative: only the distance within the window counts, also past frame 1,023."""
    config = dataclasses.replace(with_rotation(tiny_config, "window"), sink_size=0)
    model = make_models(config).transformer
    near, far = (window_flow(config, model, start) for start in (0, 3 * 50_000))
    assert near.std() > 0.1
    assert (near - far).abs().max() < 1e-4


def test_the_public_model_with_window_rotation_has_no_last_frame() -> None:
    config = preset("longlive-1-3b")
    assert config.session_frames == config.rotation_frames == 1024
    assert with_rotation(config, "window").session_frames is None
