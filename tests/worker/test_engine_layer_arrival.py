"""States that arrive layer by layer: what waits for a layer, what for the whole state, and failing copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.waiting import LIMIT_S
from turboserve.worker.engine.errors import StateNotArrivedError
from turboserve.worker.engine.interface import ChunkReady, SessionFailed, SessionSpec
from turboserve.worker.engine.layer_arrival import LayerArrival
from turboserve.worker.engine.state_transfer import Transfer
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.model.config import ModelConfig

MakeDriver = Callable[..., Any]


def spec(name: str, seed: int) -> SessionSpec:
    return SessionSpec(name, f"a circle of color {seed}", seed)


def chunks_of(events: list[Any], name: str) -> list[ChunkReady]:
    return [event for event in events if isinstance(event, ChunkReady) and event.session == name]


class StepwiseCopies:
    """Copies of arriving states that stop before each layer until the test lets it through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.layers = threading.Semaphore(0)
        copied, waited = LayerArrival.arrived, LayerArrival.wait

        def arrived(arrival: LayerArrival, layer: int) -> None:
            assert self.layers.acquire(timeout=LIMIT_S)
            self.order.append(f"copied {layer}")
            copied(arrival, layer)

        def wait(arrival: LayerArrival, layer: int) -> None:
            if not arrival._layers[layer].is_set():
                self.order.append(f"waits {layer}")
                self.layers.release()
            waited(arrival, layer)
            self.order.append(f"computes {layer}")

        monkeypatch.setattr(LayerArrival, "arrived", arrived)
        monkeypatch.setattr(LayerArrival, "wait", wait)


def test_a_forward_waits_for_each_layer_only(
    make_driver: MakeDriver, tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(tiny_config, num_layers=4)
    driver = make_driver(slabs=1, config=config, overlap=True, max_lead_s=2.0)
    driver.engine.admit(spec("a", 0), driver.now)
    made = len(chunks_of(driver.run(), "a"))
    driver.engine.suspend("a")
    driver.run()
    copies = StepwiseCopies(monkeypatch)
    driver.engine.resume("a", driver.now)
    driver.engine.generate_next("a")
    copies.layers.release()
    [chunk] = chunks_of(driver.run(), "a")
    # Each layer is copied only after the forward has computed the one before and waits for it.
    first = copies.order[: copies.order.index("computes 3") + 1]
    assert first[0] == "copied 0"
    for layer in (1, 2, 3):
        at = first.index(f"copied {layer}")
        assert first.index(f"computes {layer - 1}") < first.index(f"waits {layer}") < at
        assert at < first.index(f"computes {layer}")
    reference = make_driver(slabs=1, config=config)
    reference.engine.admit(spec("a", 0), reference.now)
    reference.engine.playhead("a", 20.0, now=reference.now, playing=False)
    expected = reference.chunks("a", made + 1)[made]
    assert torch.equal(chunk.latents, expected.latents)


def test_a_copy_that_fails_in_the_middle_ends_only_its_session(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(slabs=2, overlap=True, max_lead_s=2.0)
    for seed, name in enumerate("ab"):
        driver.engine.admit(spec(name, seed), driver.now)
    driver.run()
    driver.engine.suspend("a")
    driver.run()
    copied = LayerArrival.arrived

    def arrived(arrival: LayerArrival, layer: int) -> None:
        if layer == 1:
            raise OSError("the host's memory is gone")
        copied(arrival, layer)

    monkeypatch.setattr(LayerArrival, "arrived", arrived)
    driver.engine.resume("a", driver.now)
    for name in "ab":
        driver.engine.generate_next(name)
    events = driver.run()
    [failed] = [event for event in events if isinstance(event, SessionFailed)]
    assert failed.session == "a"
    assert chunks_of(events, "b")
    assert (driver.engine.free_slabs, driver.engine.host_bytes_used) == (1, 0)


def test_a_chunk_is_decoded_only_with_the_decoder_s_whole_cache(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(slabs=1, overlap=True, max_lead_s=2.0)
    engine = driver.engine
    engine.admit(spec("a", 0), driver.now)
    made = len(chunks_of(driver.run(), "a"))
    engine.suspend("a")
    driver.run()
    copied, decoder = LayerArrival.arrived, threading.Event()

    def arrived(arrival: LayerArrival, layer: int) -> None:
        copied(arrival, layer)
        if arrival.complete:
            assert decoder.wait(LIMIT_S)

    monkeypatch.setattr(LayerArrival, "arrived", arrived)
    engine.resume("a", driver.now)
    engine.generate_next("a")
    held = engine.sessions["a"]
    with torch.inference_mode():
        for tensor in held.state.decoder_cache.values():
            # New memory may have the old contents.
            tensor.fill_(1000.0)
    driver.run(lambda _: bool(held.undecoded))
    # With nothing to wait for, the chunk is in the decode executor after the next steps.
    for _ in range(10):
        engine.step(driver.now)
        engine.wait(0.01)
    assert not held.in_decode_executor
    assert held.delivered == made
    decoder.set()
    [chunk] = chunks_of(driver.run(), "a")
    reference = make_driver(slabs=1)
    reference.engine.admit(spec("a", 0), reference.now)
    reference.engine.playhead("a", 20.0, now=reference.now, playing=False)
    expected = reference.chunks("a", made + 1)[made]
    assert torch.equal(chunk.latents, expected.latents)
    assert torch.equal(chunk.frames, expected.frames)


def test_a_device_lost_in_a_copy_ends_the_engine_and_no_session(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(slabs=1, overlap=True, max_lead_s=2.0)
    driver.engine.admit(spec("a", 0), driver.now)
    driver.run()
    driver.engine.suspend("a")
    driver.run()
    copied, waited, run = LayerArrival.arrived, LayerArrival.wait, Transfer.run
    waits, failed = threading.Event(), threading.Event()

    def arrived(arrival: LayerArrival, layer: int) -> None:
        if layer == 1:
            assert waits.wait(LIMIT_S)
            raise DEVICE_LOST[0]("an illegal memory access was encountered")
        copied(arrival, layer)

    def wait(arrival: LayerArrival, layer: int) -> None:
        if layer == 1:
            waits.set()
        try:
            waited(arrival, layer)
        except Exception:
            failed.set()
            raise

    def slow(transfer: Transfer) -> None:
        try:
            run(transfer)
        finally:
            # The executor notes its failure only after the forward has failed.
            assert failed.wait(LIMIT_S)

    monkeypatch.setattr(LayerArrival, "arrived", arrived)
    monkeypatch.setattr(LayerArrival, "wait", wait)
    monkeypatch.setattr(Transfer, "run", slow)
    driver.engine.resume("a", driver.now)
    driver.engine.generate_next("a")
    with pytest.raises(DEVICE_LOST):
        driver.run()
    assert set(driver.engine.sessions) == {"a"}


def test_a_state_whose_first_layer_fails_does_not_begin() -> None:
    arrival = LayerArrival("a", 2, torch.device("cpu"))
    arrival.end(OSError("the host's memory is gone"))
    assert not arrival.begun
    assert not arrival.complete
    with pytest.raises(StateNotArrivedError, match="layer 0") as caught:
        arrival.wait(0)
    assert isinstance(caught.value.__cause__, OSError)
