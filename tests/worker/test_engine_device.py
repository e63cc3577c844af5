"""Errors that only a GPU would show: tensors left on the host, waits for it, and a failing device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turboserve.worker.engine.context_forwards import RecacheWork
from turboserve.worker.engine.interface import ChunkReady, Control, Decoder, SessionFailed, SessionSpec
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import SlabLayout, SlabPool
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.engine.work import ChunkWork, RowsForward
from turboserve.worker.model.presets import preset
from turboserve.worker.model.schedule import Schedule
from turboserve.worker.model.taehv import Taehv, TaehvConfig, TaehvDecoder
from turboserve.worker.model.transformer import CausalWanTransformer
from turboserve.worker.model.wan_vae import WanDecoder, WanVae
from turboserve.worker.model.wan_vae_config import WanVaeConfig

DEVICE = torch.device("meta")
"""Stands for a GPU: it has shapes and no contents, so no value on it can be waited for."""


class AllThere(TorchDispatchMode):
    """Refuses every operation on a tensor that is not on the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self.seen += 1
                assert leaf.device.type == DEVICE.type, f"{func}: a tensor on {leaf.device}"
        return result


@torch.inference_mode()
def test_no_forward_at_full_size_touches_a_tensor_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    # All layers do the same, and so do all steps.
    config = dataclasses.replace(
        preset("longlive-1-3b"), num_layers=1, denoising_steps=(1000, 500), rotation="window"
    )
    with DEVICE:
        model = CausalWanTransformer(config).to(torch.bfloat16)
        text = torch.empty(1, config.text_len, config.text_dim, dtype=torch.bfloat16)
    layout = SlabLayout.of(config, torch.bfloat16)
    pool = SlabPool(layout, 2 * layout.total_bytes, DEVICE)
    forward, schedule, states = RowsForward(model), Schedule(config), []
    for name in ("a", "b"):
        slab = pool.acquire()
        ring = KVRing(slab, config, model.rotation)
        states.append(SessionState(name, slab, ring, torch.Generator(), 0, ""))

    def noise(_: int) -> Tensor:
        return torch.empty(config.latent_shape, device=DEVICE)

    def run(works: list[Any]) -> None:
        while works[0].done < works[0].total:
            for work, flow in zip(works, forward([work.row() for work in works]), strict=True):
                assert flow.shape == (work.frames, *config.latent_shape[1:])
                work.advance(flow)

    # It would copy a number from the host to the device, and wait for that.
    monkeypatch.setattr(torch, "tensor", None)
    with AllThere() as guard:
        for state in states:
            state.ring.set_text(model.project_text(text), row=0)
        # The window is full after four chunks; from then on frames are evicted.
        for _ in range(5):
            works = [ChunkWork(state, config, schedule, noise) for state in states]
            run(works)
            for state, work in zip(states, works, strict=True):
                assert work.clean is not None
                state.remember(work.clean.to(torch.bfloat16), config)
                state.next_chunk += 1
        run([RecacheWork(state, config, schedule) for state in states])
    assert guard.seen > 500


@pytest.mark.parametrize(
    "make",
    [
        lambda: WanDecoder(WanVae(WanVaeConfig()).to(torch.bfloat16), 60, 104),
        lambda: TaehvDecoder(Taehv(TaehvConfig()).to(torch.bfloat16), 60, 104),
    ],
)
@torch.inference_mode()
def test_no_decode_at_full_size_touches_a_tensor_of_the_host(make: Callable[[], Decoder]) -> None:
    with DEVICE:
        decoder, latents = make(), torch.empty(2, 3, 16, 60, 104)
    with AllThere():
        first, caches = decoder.decode(latents, None)
        after, _ = decoder.decode(latents, caches)
    assert (first.shape, after.shape) == ((2, 9, 480, 832, 3), (2, 12, 480, 832, 3))


@pytest.mark.parametrize(("stage", "overlap"), [("forward", False), ("text", False), ("decode", True)])
def test_a_lost_device_is_no_session_s_fault_and_ends_the_engine(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stage: str, overlap: bool
) -> None:
    """Otherwise every session of a worker with a broken GPU would fail for good, one after the other.

    Each of them could continue on another worker.
    """
    driver = make_driver(overlap=overlap)

    def lost(*_: object) -> Any:
        raise DEVICE_LOST[0]("an illegal memory access was encountered")

    monkeypatch.setattr(getattr(driver.engine, stage), "compute", lost)
    for name in ("a", "b"):
        driver.engine.admit(SessionSpec(name, "a red circle"), driver.now)
    with pytest.raises(RuntimeError) as caught:
        driver.run()
    said = caught.value.__cause__ if overlap else caught.value
    assert isinstance(said, DEVICE_LOST)
    assert set(driver.engine.sessions) == {"a", "b"}


def test_a_lost_device_ends_the_engine_while_a_state_migrates(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(max_lead_s=1.0)
    driver.engine.admit(SessionSpec("a", "a red circle"), driver.now)
    driver.run()

    def lost(*_: object, **__: object) -> Any:
        raise DEVICE_LOST[0]("unspecified launch failure")

    monkeypatch.setattr(Tensor, "copy_", lost)
    driver.engine.suspend("a")
    with pytest.raises(DEVICE_LOST):
        driver.engine.step(driver.now)


def test_what_fails_at_a_boundary_ends_its_session_alone(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(max_lead_s=2.0)
    encode = driver.engine.models.text.encode

    def too_long(prompts: list[str]) -> Tensor:
        text: Tensor = encode(prompts)
        return text.repeat(1, 3, 1) if "long" in prompts else text

    driver.engine.admit(SessionSpec("a", "a red circle"), driver.now)
    driver.engine.admit(SessionSpec("b", "a red circle"), driver.now)
    driver.run()
    monkeypatch.setattr(driver.engine.models.text, "encode", too_long)
    driver.engine.control("b", Control(1, prompt="long"))
    driver.engine.playhead("a", 1.0, now=driver.now, playing=False)
    events = driver.run()
    [failed] = [event for event in events if isinstance(event, SessionFailed)]
    assert failed.session == "b"
    assert "12 tokens exceed the model's text_len of 5" in failed.error
    assert set(driver.engine.sessions) == {"a"}
    assert driver.engine.free_slabs == 3


@pytest.mark.parametrize("harm", [torch.OutOfMemoryError, DEVICE_LOST[0]])
def test_what_fails_after_a_forward_ends_its_session_alone_unless_the_device_is_lost(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, harm: type[Exception]
) -> None:
    driver = make_driver(max_lead_s=1.0)
    sessions, advance = driver.engine.sessions, ChunkWork.advance

    def fails(work: ChunkWork, flow: Tensor) -> None:
        if "b" in sessions and work is sessions["b"].work:
            raise harm("no room for noise")
        advance(work, flow)

    monkeypatch.setattr(ChunkWork, "advance", fails)
    for name in ("b", "a"):
        driver.engine.admit(SessionSpec(name, "a red circle"), driver.now)
    if harm in DEVICE_LOST:
        with pytest.raises(harm):
            driver.run()
        assert set(sessions) == {"a", "b"}
        return
    events = driver.run()
    [failed] = [event for event in events if isinstance(event, SessionFailed)]
    assert (failed.session, set(sessions)) == ("b", {"a"})
    assert "no room for noise" in failed.error
    assert {event.session for event in events if isinstance(event, ChunkReady)} == {"a"}
