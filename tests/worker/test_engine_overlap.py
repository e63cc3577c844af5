"""Decoding beside denoising, and suspension beside both: the same results, bounded, safe at every moment."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.waiting import eventually_blocking
from turboserve.worker.engine.activity import Transferring
from turboserve.worker.engine.interface import (
    ChunkReady,
    Control,
    SessionEnded,
    SessionFailed,
    SessionSpec,
    Suspended,
    SuspendRefused,
)
from turboserve.worker.engine.state_transfer import Transfer
from turboserve.worker.engine.streams import StreamExecutor, Wakeup
from turboserve.worker.model.config import ModelConfig

MakeDriver = Callable[..., Any]
WAIT_S = 120.0


def spec(name: str, prompt: str = "a red circle", seed: int = 1) -> SessionSpec:
    return SessionSpec(name, prompt, seed)


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


class Gate:
    """Holds a call back on a stream executor's thread until it is opened."""

    def __init__(self, held: Callable[..., Any]) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self._held = held

    def __call__(self, *arguments: Any) -> Any:
        self.entered.release()
        assert self.open.wait(WAIT_S)
        return self._held(*arguments)


@pytest.fixture
def gated_decoder(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Gate]:
    def hold(driver: Any) -> Gate:
        decoder = driver.engine.backend.decoder
        gate = Gate(decoder.decode)
        monkeypatch.setattr(decoder, "decode", gate)
        return gate

    return hold


@pytest.fixture
def gated_transfers(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(Transfer.run)
    monkeypatch.setattr(Transfer, "run", lambda transfer: gate(transfer))
    return gate


def steps_until(driver: Any, holds: Callable[[], bool]) -> list[Any]:
    events: list[Any] = []
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        events += driver.engine.step(driver.now)
        driver.now += 0.001
    return events


def story(driver: Any) -> list[ChunkReady]:
    """Return a session's chunks through suspension, resumption and prompt switch, with a lead of 3 chunks."""
    driver.engine.admit(spec("a"), driver.now)
    chunks = of(ChunkReady, driver.run())
    driver.engine.suspend("a")
    driver.run()
    driver.engine.resume("a", driver.now)
    driver.engine.control("a", Control(1, prompt="a blue square"))
    for position in (1.5, 3.0):
        driver.engine.playhead("a", position, now=driver.now, playing=False)
        chunks += of(ChunkReady, driver.run())
    return chunks


def test_a_session_is_bit_equal_with_and_without_overlap(make_driver: MakeDriver) -> None:
    apart = story(make_driver(max_lead_s=2.0))
    beside = story(make_driver(max_lead_s=2.0, overlap=True))
    assert [chunk.index for chunk in beside] == list(range(len(apart)))
    assert [chunk.control_seq for chunk in beside] == [0, 0, 0, 1, 1, 1, 1]
    for ours, theirs in zip(beside, apart, strict=True):
        assert torch.equal(ours.latents, theirs.latents)
        assert torch.equal(ours.frames, theirs.frames)


def test_a_decoded_chunk_does_not_wait_for_the_next_forward(
    make_driver: MakeDriver, gated_decoder: Callable[[Any], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines returned a chunk with the events of the forward that followed: up to a fifth of a chunk's time
    # too late.
    driver = make_driver(max_lead_s=30.0, overlap=True)
    gate = gated_decoder(driver)
    driver.engine.admit(spec("a"), driver.now)
    steps_until(driver, lambda: driver.engine.sessions["a"].state.next_chunk == 1)
    assert driver.engine.has_work(driver.now)
    gate.open.set()
    driver.engine.wait(WAIT_S)
    backend = driver.engine.backend
    monkeypatch.setattr(backend, "forward", lambda works: pytest.fail("a forward ran first"))
    assert [chunk.index for chunk in of(ChunkReady, driver.engine.step(driver.now))] == [0]


def test_the_next_chunk_is_denoised_while_one_is_decoded_and_no_more_than_that(
    make_driver: MakeDriver, gated_decoder: Callable[[Any], Gate]
) -> None:
    driver = make_driver(max_lead_s=30.0, overlap=True)
    gate = gated_decoder(driver)
    driver.engine.admit(spec("a"), driver.now)
    session = driver.engine.sessions["a"]
    events = steps_until(driver, lambda: session.chunk is not None and session.chunk.index == 1)
    assert gate.entered.acquire(timeout=WAIT_S)
    events += steps_until(driver, lambda: session.work is None)
    assert of(ChunkReady, events) == []
    # Two chunks wait for the decoder: a third is not begun, and there is no busy loop meanwhile.
    assert [each.index for each in session.undecoded] == [0, 1]
    assert not driver.engine.has_work(driver.now)
    assert driver.engine.next_due(driver.now) is None
    gate.open.set()
    chunks = driver.chunks("a", 4)
    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3]
    assert all(c.timings.denoised_s <= c.timings.ready_s for c in chunks)


def test_a_session_suspends_with_all_its_chunks_delivered(
    make_driver: MakeDriver, gated_decoder: Callable[[Any], Gate]
) -> None:
    driver = make_driver(max_lead_s=30.0, overlap=True)
    gate = gated_decoder(driver)
    driver.engine.admit(spec("a"), driver.now)
    session = driver.engine.sessions["a"]
    steps_until(driver, lambda: session.chunk is not None and session.chunk.index == 1)
    driver.engine.suspend("a")
    events = steps_until(driver, lambda: session.work is None)
    assert of(Suspended, events) == []
    gate.open.set()
    events += driver.run()
    assert [type(event) for event in events if isinstance(event, ChunkReady | Suspended)] == [
        ChunkReady,
        ChunkReady,
        Suspended,
    ]
    assert of(Suspended, events)[0].next_chunk == 2


def test_the_end_is_reported_after_the_last_chunk(make_driver: MakeDriver, tiny_config: ModelConfig) -> None:
    changed = {"local_attn_size": -1, "sink_size": 0, "max_frames": 7, "rotation": "absolute"}
    config = ModelConfig(**{**vars(tiny_config), **changed})
    driver = make_driver(config=config, max_lead_s=30.0, overlap=True)
    driver.engine.admit(spec("a"), driver.now)
    events = [event for event in driver.run() if isinstance(event, ChunkReady | SessionEnded)]
    assert [type(event) for event in events] == [ChunkReady, ChunkReady, SessionEnded]


def test_frames_decoded_for_an_evicted_session_are_dropped(
    make_driver: MakeDriver, gated_decoder: Callable[[Any], Gate]
) -> None:
    driver = make_driver(slabs=1, max_lead_s=1.0, overlap=True)
    gate = gated_decoder(driver)
    driver.engine.admit(spec("a", seed=1), driver.now)
    session = driver.engine.sessions["a"]
    steps_until(driver, lambda: session.in_decode_executor)
    driver.engine.evict("a")
    assert driver.engine.free_slabs == 1
    driver.engine.admit(spec("a", seed=2), driver.now)
    gate.open.set()
    chunks = of(ChunkReady, driver.run())
    fresh = make_driver(slabs=1, max_lead_s=1.0)
    fresh.engine.admit(spec("a", seed=2), fresh.now)
    expected = of(ChunkReady, fresh.run())
    assert [chunk.index for chunk in chunks] == [chunk.index for chunk in expected] == [0, 1]
    assert all(torch.equal(a.frames, b.frames) for a, b in zip(chunks, expected, strict=True))


def test_a_decoder_that_fails_in_its_lane_fails_its_session_alone(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(max_lead_s=2.0, overlap=True)
    decoder = driver.engine.backend.decoder
    works = decoder.decode

    def decode(latents: Tensor, caches: list[dict[str, Tensor]] | None) -> Any:
        if not torch.isfinite(latents).all():
            raise RuntimeError("not a number")
        return works(latents, caches)

    monkeypatch.setattr(decoder, "decode", decode)
    driver.engine.admit(spec("a"), driver.now)
    driver.engine.admit(spec("b"), driver.now)
    bad = driver.engine.sessions["b"]
    steps_until(driver, lambda: bad.chunk is not None and bad.chunk.index == 1)
    bad.chunk._noisy.fill_(float("nan"))
    events = driver.run()
    assert [event.session for event in of(SessionFailed, events)] == ["b"]
    assert driver.engine.free_slabs == 3
    assert [c.index for c in of(ChunkReady, events) if c.session == "a"][-1] == 2


def test_others_compute_while_a_session_leaves_and_returns(
    make_driver: MakeDriver, gated_transfers: Gate
) -> None:
    driver = make_driver(slabs=2, max_lead_s=30.0, overlap=True)
    for name in ("a", "b"):
        driver.engine.admit(spec(name), driver.now)
    driver.chunks("a", 2)
    driver.engine.suspend("a")
    steps_until(driver, lambda: isinstance(driver.engine.sessions["a"].activity, Transferring))
    assert len(driver.chunks("b", 3)) == 3
    assert driver.engine.free_slabs == 0
    gated_transfers.open.set()
    events = driver.run(lambda e: bool(of(Suspended, e)))
    assert driver.engine.free_slabs == 1
    left = of(Suspended, events)[0].next_chunk
    before = driver.engine.snapshot("a").digest()

    gated_transfers.open.clear()
    driver.engine.resume("a", driver.now)
    assert len(driver.chunks("b", 3)) == 3
    gated_transfers.open.set()
    driver.engine.suspend("a")
    driver.run(lambda e: bool(of(Suspended, e)))
    assert driver.engine.snapshot("a").next_chunk == left
    assert driver.engine.snapshot("a").digest() == before


@pytest.mark.parametrize("way", ["leaving", "arriving"])
def test_a_session_can_be_evicted_on_its_way(
    make_driver: MakeDriver, gated_transfers: Gate, way: str
) -> None:
    driver = make_driver(slabs=1, max_lead_s=1.0, overlap=True)
    driver.engine.admit(spec("a"), driver.now)
    driver.run()
    driver.engine.suspend("a")
    if way == "arriving":
        gated_transfers.open.set()
        driver.run()
        gated_transfers.open.clear()
        driver.engine.resume("a", driver.now)
    else:
        driver.engine.step(driver.now)
    assert gated_transfers.entered.acquire(timeout=WAIT_S)
    driver.engine.evict("a")
    assert driver.engine.free_slabs == 1
    assert driver.engine.host_bytes_used == 0
    # The slab and the host memory are reused at once; transfers under way do not touch them.
    driver.engine.admit(spec("b", seed=5), driver.now)
    chunks = of(ChunkReady, driver.run(lambda e: len(of(ChunkReady, e)) == 1))
    gated_transfers.open.set()
    chunks += of(ChunkReady, driver.run())
    fresh = make_driver(slabs=1, max_lead_s=1.0)
    fresh.engine.admit(spec("b", seed=5), fresh.now)
    expected = of(ChunkReady, fresh.run())
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(chunks, expected, strict=True))


def test_a_transfer_that_fails_loses_nothing(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(slabs=1, max_lead_s=30.0, overlap=True)
    driver.engine.admit(spec("a"), driver.now)
    driver.chunks("a", 2)
    works = Transfer.run

    def fails(transfer: Transfer) -> None:
        transfer.error = OSError("no such page")

    monkeypatch.setattr(Transfer, "run", fails)
    driver.engine.suspend("a")
    events = driver.run(lambda e: bool(of(SuspendRefused, e)))
    assert "no such page" in of(SuspendRefused, events)[0].reason
    assert driver.engine.host_bytes_used == 0
    monkeypatch.setattr(Transfer, "run", works)
    driver.engine.suspend("a")
    assert of(Suspended, driver.run(lambda e: bool(of(Suspended, e))))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
def test_calls_at_any_moment_leave_every_chunk_in_order_and_no_memory_behind(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance, delays = random.Random(seed), random.Random(seed)
    driver = make_driver(slabs=3, max_lead_s=30.0, overlap=True, host_bytes=150_000)
    engine, decoder = driver.engine, driver.engine.backend.decoder
    works = decoder.decode

    def slow(latents: Tensor, caches: list[dict[str, Tensor]] | None) -> Any:
        # Not from `chance`: the stream executor's thread would change which calls are made.
        time.sleep(delays.choice((0, 0, 0.002)))
        return works(latents, caches)

    monkeypatch.setattr(decoder, "decode", slow)
    made, following = 0, dict[str, int]()
    suspended: set[str] = set()
    for turn in range(400):
        name = chance.choice("abcd")
        call = chance.choice(("admit", "suspend", "resume", "evict", "control", "step", "step", "step"))
        here = name in engine.sessions
        if call == "admit" and name not in following and engine.free_slabs:
            engine.admit(spec(name, seed=turn), driver.now)
            following[name] = 0
        elif call == "suspend" and here:
            engine.suspend(name)
        elif call == "control" and here:
            engine.control(name, Control(turn, prompt=f"prompt {turn}"))
        elif call == "resume" and name in suspended and engine.free_slabs:
            engine.resume(name, driver.now)
            suspended.discard(name)
        elif call == "evict" and name in following and chance.random() < 0.3:
            engine.evict(name)
            del following[name]
            suspended.discard(name)
        if turn % 50 == 49 and engine.executors_busy:
            # On a busy machine the stream executors' threads would get no turn, and no chunk would be made.
            engine.wait(WAIT_S)
        for _ in range(chance.randrange(8)):
            driver.now += 0.001
            for event in engine.step(driver.now):
                assert not isinstance(event, SessionFailed)
                if isinstance(event, ChunkReady):
                    assert event.index == following[event.session]
                    following[event.session] += 1
                    made += 1
                elif isinstance(event, Suspended):
                    assert event.next_chunk == following[event.session]
                    suspended.add(event.session)
    # Of all sessions: the remaining ones may be new.
    assert made > 0
    for name in list(following):
        engine.evict(name)
    driver.run()
    assert engine.free_slabs == 3
    assert engine.host_bytes_used == 0
    assert not engine.executors_busy


def test_a_lane_that_breaks_down_says_so() -> None:
    class Broken:
        def run(self) -> None:
            raise SystemExit(3)

    lane: StreamExecutor[Broken] = StreamExecutor("broken", torch.device("cpu"), Wakeup(), threaded=True)
    lane.submit(Broken())
    eventually_blocking(lambda: lane.finished)
    with pytest.raises(RuntimeError, match="stream executor broken has failed"):
        lane.collect()
