"""The ring against a naive list of frames: generation, eviction and recache give the same attention."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.engine.errors import FramesExhaustedError
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import SlabLayout, SlabPool
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.rope import Rotation, rotate

CPU = torch.device("cpu")
HEADS, WIDTH, TOKENS, LAYERS = 2, 12, 2, 2


def config_of(
    window: int, sink: int, chunk: int, rotation: str = "absolute", frames: int = 64
) -> ModelConfig:
    values: dict[str, Any] = {
        "dim": HEADS * WIDTH, "ffn_dim": 8, "num_heads": HEADS, "num_layers": LAYERS, "text_dim": 4,
        "text_len": 2, "latent_height": 2, "latent_width": 4, "local_attn_size": window, "sink_size": sink,
        "frames_per_chunk": chunk, "rotation": rotation, "max_frames": frames,
    }  # fmt: skip
    return ModelConfig(**values)


def ring_of(config: ModelConfig) -> KVRing:
    layout = SlabLayout.of(config, torch.float32)
    return KVRing(SlabPool(layout, layout.total_bytes, CPU).acquire(), config, Rotation(config))


class NaiveWindow:
    """Frames in order in a list, copied as needed: the ring must be equal to it."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.frames: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, first: int, k: Tensor, v: Tensor, skip: frozenset[int] = frozenset()) -> None:
        for i in range(k.shape[0] // TOKENS):
            if first + i not in skip:
                part = slice(i * TOKENS, (i + 1) * TOKENS)
                self.frames[first + i] = (k[part], v[part])
        window, sink = self.config.local_attn_size, self.config.sink_size
        if window != -1:
            newest = sorted(self.frames)
            kept = newest[:sink] + newest[sink:][-(window - sink) :]
            self.frames = {frame: self.frames[frame] for frame in kept}

    def attend(self, q: Tensor, rotation: Rotation, masked: frozenset[int] = frozenset()) -> Tensor:
        """`masked`: frames that no query attends to."""
        order = sorted(self.frames)
        keys = []
        for i, frame in enumerate(order):
            key = self.frames[frame][0]
            if self.config.rotation == "window" and self.config.local_attn_size != -1:
                # Every key is rotated as if the window's frames were numbered without gaps, ending at the
                # newest.
                start = order[-1] + 1 - len(order)
                key = rotate(key.unsqueeze(0), rotation.by_frames(start + i - frame, CPU))[0]
            keys.append(key)
        values = [self.frames[frame][1] for frame in order]
        for _ in range(len(order), self.config.sink_size):
            # LongLive 1 reads its whole sink, with zeros for frames that do not exist yet.
            keys.append(torch.zeros_like(keys[0]))
            values.append(torch.zeros_like(keys[0]))
        parts = (q, torch.cat(keys), torch.cat(values))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in parts)
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
        for i, frame in enumerate(order):
            mask[:, i * TOKENS : (i + 1) * TOKENS] = frame not in masked
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


@st.composite
def histories(draw: st.DrawFn) -> tuple[ModelConfig, list[str], int]:
    chunk = draw(st.integers(1, 4))
    sink = draw(st.integers(0, 4))
    windowed = draw(st.booleans())
    window = sink + chunk + draw(st.integers(0, 7)) if windowed else -1
    rotation = draw(st.sampled_from(("absolute", "window")))
    config = config_of(window, sink if windowed else 0, chunk, rotation)
    events = draw(st.lists(st.sampled_from(("chunk", "chunk", "chunk", "recache")), min_size=1, max_size=12))
    return config, events, draw(st.integers(0, 2**20))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_any_history_attends_like_a_naive_window(history: tuple[ModelConfig, list[str], int]) -> None:
    config, events, seed = history
    torch.manual_seed(seed)
    ring, rotation = ring_of(config), Rotation(config)
    naive = [NaiveWindow(config) for _ in range(LAYERS)]
    storage = [ring.slab.keys.data_ptr(), ring.slab.values.data_ptr()]
    end, sink = 0, config.sink_size if config.local_attn_size != -1 else 0
    for event in events:
        if event == "chunk":
            first, count, skip, steps = end, config.frames_per_chunk, frozenset[int](), 3
            placement = ring.place(first, count)
            end += count
        else:
            count = min(end, config.window_frames)
            if not count:
                continue
            first, steps = end - count, 1
            placement = ring.resident(first, count, keep_sink=first > 0)
            lost = set(range(first, end)) - set(ring.frames)
            skip = frozenset(lost | (set(ring.frames[:sink]) if first > 0 else set()))
        for _ in range(steps):
            for layer in range(LAYERS):
                q, k, v = torch.randn(3, count * TOKENS, HEADS, WIDTH)
                found = ring.attend(layer, placement, q[None], k[None], v[None])
                naive[layer].write(first, k, v, skip)
                assert torch.allclose(found, naive[layer].attend(q, rotation), atol=2e-5)
        assert sorted(ring.frames) == sorted(naive[0].frames)
    assert [ring.slab.keys.data_ptr(), ring.slab.values.data_ptr()] == storage


def test_a_new_frame_takes_the_position_of_the_one_it_evicts_and_moves_nothing() -> None:
    ring = ring_of(config_of(window=6, sink=2, chunk=2))
    for first in (0, 2, 4):
        ring.place(first, 2)
    keys = ring.slab.keys
    keys.copy_(torch.arange(6.0).view(1, 6, 1, 1, 1).expand_as(keys))
    placement = ring.place(6, 2)
    assert ring.frames == [0, 1, 6, 7, 4, 5]
    assert placement.runs == ((2 * TOKENS, 0, 2 * TOKENS),)
    ring.attend(0, placement, *torch.full((3, 1, 2 * TOKENS, HEADS, WIDTH), 9.0))
    assert keys[0, :, 0, 0, 0].tolist() == [0, 1, 9, 9, 4, 5]
    assert ring.place(6, 2) == placement
    ring.place(8, 2)
    assert ring.frames == [0, 1, 6, 7, 8, 9]


def test_a_chunk_may_wrap_around_the_end_of_the_ring() -> None:
    ring = ring_of(config_of(window=6, sink=1, chunk=3))
    for first in (0, 3):
        ring.place(first, 3)
    assert ring.place(6, 3).runs == ((1 * TOKENS, 0, 3 * TOKENS),)
    assert ring.place(9, 3).runs == ((4 * TOKENS, 0, 2 * TOKENS), (1 * TOKENS, 2 * TOKENS, 1 * TOKENS))
    assert ring.frames == [0, 11, 7, 8, 9, 10]


def test_a_sink_longer_than_a_chunk_begins_as_zeros_whatever_was_there_before() -> None:
    ring = ring_of(config_of(window=6, sink=3, chunk=1))
    for tensor in (ring.slab.keys, ring.slab.values):
        tensor.fill_(float("nan"))
    assert ring.place(0, 1).visible == ring.place(1, 1).visible == 3 * TOKENS
    kept = {name: tensor.clone() for name, tensor in ring.filled().items()}
    again = ring_of(config_of(window=6, sink=3, chunk=1))
    for tensor in (again.slab.keys, again.slab.values):
        tensor.fill_(float("nan"))
    again.restore(ring.frames, 3, 0)
    for one in (ring, again):
        assert [bool(one.slab.keys[:, position].isnan().any()) for position in (2, 3)] == [False, True]
    assert kept["keys"].shape[1] == 2


def test_without_a_window_the_end_is_an_error_that_changes_nothing() -> None:
    ring = ring_of(config_of(window=-1, sink=0, chunk=3, frames=7))
    ring.place(0, 3)
    ring.place(3, 3)
    with pytest.raises(FramesExhaustedError, match="9 wanted, the model's limit is 7"):
        ring.place(6, 3)
    assert ring.frames == [0, 1, 2, 3, 4, 5]


def test_a_long_session_in_window_rotation_keeps_its_precision() -> None:
    config = config_of(window=6, sink=2, chunk=2, rotation="window")
    ring, rotation, naive = ring_of(config), Rotation(config), NaiveWindow(config)
    torch.manual_seed(0)
    for first in range(0, 2000, 2):
        placement = ring.place(first, 2)
        q, k, v = torch.randn(3, 2 * TOKENS, HEADS, WIDTH)
        found = ring.attend(0, placement, q[None], k[None], v[None])
        naive.write(first, k, v)
    assert torch.allclose(found, naive.attend(q, rotation), atol=2e-5)


def test_slabs_of_two_sessions_do_not_touch() -> None:
    config = config_of(window=6, sink=2, chunk=2)
    layout = SlabLayout.of(config, torch.float32)
    pool = SlabPool(layout, 2 * layout.total_bytes, CPU)
    one, two = (KVRing(pool.acquire(), config, Rotation(config)) for _ in range(2))
    for ring in (one, two):
        ring.place(0, 2)
        for tensor in ring.filled().values():
            tensor.zero_()
    one.attend(0, one.place(2, 2), *torch.ones(3, 1, 2 * TOKENS, HEADS, WIDTH))
    first, second = (ring.filled()["keys"].untyped_storage().data_ptr() for ring in (one, two))
    assert first == second
    assert not any(tensor.any() for tensor in two.filled().values())


def test_layouts_count_every_byte() -> None:
    for rotation in ("absolute", "window"):
        layout = SlabLayout.of(config_of(6, 2, 2, rotation), torch.float32)
        pool = SlabPool(layout, 3 * layout.total_bytes + 5, CPU)
        assert pool.slabs == 3
        assert pool.allocated_bytes == 3 * layout.total_bytes
        assert layout.sink_bytes == (0 if rotation == "absolute" else 2 * LAYERS * TOKENS * HEADS * WIDTH * 4)
    assert dataclasses.replace(layout, dtype=torch.bfloat16).total_bytes * 2 == layout.total_bytes
