"""Sessions through the engine: chunks, lead, controls, suspension, rebuilding, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from turboserve.worker.engine.errors import (
    DuplicateSessionError,
    InvalidRebuildError,
    SlabsExhaustedError,
    SnapshotRejectedError,
    UnknownSessionError,
)
from turboserve.worker.engine.interface import (
    ChunkReady,
    Control,
    ControlApplied,
    Rebuild,
    SessionEnded,
    SessionFailed,
    SessionReady,
    SessionSpec,
    Suspended,
    SuspendRefused,
)
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.model.config import ModelConfig

MakeDriver = Callable[..., Any]


def spec(name: str, prompt: str = "a red circle", seed: int = 1, **rest: Any) -> SessionSpec:
    return SessionSpec(name, prompt, seed, **rest)


def of(kind: type, events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_a_session_delivers_contiguous_chunks_up_to_its_lead(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=2.0)
    driver.engine.admit(spec("a"), driver.now)
    events = driver.run()
    chunks = of(ChunkReady, events)
    # Chunks start at 0, 0.5625, 1.3125 and 2.0625 s of video; the last is past the lead.
    assert [c.index for c in chunks] == [0, 1, 2]
    assert [c.frames.shape for c in chunks] == [(9, 8, 8, 3), (12, 8, 8, 3), (12, 8, 8, 3)]
    assert [c.media_start_s for c in chunks] == [0.0, 0.5625, 1.3125]
    assert isinstance(events[0], SessionReady)
    assert all(
        c.timings.due_s <= c.timings.started_s <= c.timings.denoised_s <= c.timings.ready_s for c in chunks
    )

    driver.engine.playhead("a", 0.1, now=driver.now, playing=False)
    assert [c.index for c in of(ChunkReady, driver.run())] == [3]


def test_a_playing_viewer_makes_the_next_chunk_due_by_time_alone(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=2.0)
    driver.engine.admit(spec("a"), driver.now)
    driver.run()
    driver.engine.playhead("a", 0.0, now=driver.now)
    due = driver.engine.next_due(driver.now)
    assert due == pytest.approx(driver.now + 0.0625)
    assert not driver.engine.has_work(due - 0.01)
    driver.now = due + 1e-6
    assert [c.index for c in of(ChunkReady, driver.run())] == [3]


def test_a_silent_viewer_is_not_generated_for_without_end(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=2.0, playhead_trust_s=1.0)
    driver.engine.admit(spec("a"), driver.now)
    driver.engine.playhead("a", 0.0, now=driver.now)
    driver.run()
    driver.now += 3600
    driver.run()
    assert driver.engine.sessions["a"].state.next_chunk == 5
    assert driver.engine.next_due(driver.now) is None


def test_prompt_switch_applies_at_the_next_chunk_and_changes_it(make_driver: MakeDriver) -> None:
    def chunks(*controls: Control) -> tuple[list[Any], list[Any]]:
        driver = make_driver(max_lead_s=30.0)
        driver.engine.admit(spec("a"), driver.now)
        events = driver.run(lambda e: len(of(ChunkReady, e)) == 4)
        for control in controls:
            driver.engine.control("a", control)
        events += driver.run(lambda e: len(of(ChunkReady, e)) == 3)
        return of(ChunkReady, events), of(ControlApplied, events)

    plain, _ = chunks()
    switched, applied = chunks(Control(7, prompt="a blue square"))
    assert applied == [ControlApplied("a", 7, 4)]
    assert [c.control_seq for c in switched] == [0, 0, 0, 0, 7, 7, 7]
    for index in range(4):
        assert torch.equal(plain[index].latents, switched[index].latents)
    for index in range(4, 7):
        assert (plain[index].latents - switched[index].latents).abs().max() > 1e-3


def test_of_several_prompts_only_the_last_is_recached_but_all_are_answered(make_driver: MakeDriver) -> None:
    driver = make_driver()
    driver.engine.admit(spec("a"), driver.now)
    driver.chunks("a", 2)
    for seq, prompt in ((1, "one"), (2, "two"), (3, "three")):
        driver.engine.control("a", Control(seq, prompt=prompt))
    applied = of(ControlApplied, driver.run())
    assert [(event.control_seq, event.chunk) for event in applied] == [(1, 2), (2, 2), (3, 2)]
    assert driver.engine.sessions["a"].state.prompt == "three"


def test_pause_stops_at_the_boundary_and_resumes(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=30.0)
    driver.engine.admit(spec("a"), driver.now)
    driver.chunks("a", 1)
    driver.engine.control("a", Control(1, paused=True))
    events = driver.run()
    assert of(ControlApplied, events) == [ControlApplied("a", 1, 1)]
    assert not of(ChunkReady, events)
    driver.engine.control("a", Control(2, paused=False))
    assert driver.chunks("a", 1)[0].index == 1


def test_suspend_and_resume_continue_bit_for_bit(make_driver: MakeDriver) -> None:
    plain = make_driver(max_lead_s=30.0)
    plain.engine.admit(spec("a"), plain.now)
    expected = plain.chunks("a", 8)

    driver = make_driver(max_lead_s=30.0, slabs=1)
    driver.engine.admit(spec("a"), driver.now)
    chunks = driver.chunks("a", 5)
    driver.engine.suspend("a")
    suspended = of(Suspended, driver.run())
    assert [event.next_chunk for event in suspended] == [5]
    assert driver.engine.free_slabs == 1

    # Another session uses and dirties the slab in between.
    driver.engine.admit(spec("b", seed=9), driver.now)
    driver.chunks("b", 4)
    with pytest.raises(SlabsExhaustedError):
        driver.engine.resume("a", driver.now)
    driver.engine.evict("b")

    driver.engine.resume("a", driver.now)
    chunks += driver.chunks("a", 3)
    assert [c.index for c in chunks] == list(range(8))
    for ours, theirs in zip(chunks, expected, strict=True):
        assert torch.equal(ours.latents, theirs.latents)
        assert torch.equal(ours.frames, theirs.frames)


def test_a_snapshot_continues_on_another_engine_bit_for_bit(make_driver: MakeDriver) -> None:
    source = make_driver(max_lead_s=30.0)
    source.engine.admit(spec("a"), source.now)
    source.chunks("a", 5)
    source.engine.suspend("a")
    source.run()
    snapshot = source.engine.snapshot("a")
    copy = Snapshot(dict(snapshot.header), {name: t.clone() for name, t in snapshot.tensors.items()})
    assert copy.digest() == snapshot.digest()

    target = make_driver(max_lead_s=30.0)
    target.engine.admit(spec("a", prompt="ignored"), target.now, snapshot=copy)
    source.engine.resume("a", source.now)
    for ours, theirs in zip(target.chunks("a", 3), source.chunks("a", 3), strict=True):
        assert ours.index == theirs.index
        assert torch.equal(ours.latents, theirs.latents)
        assert torch.equal(ours.frames, theirs.frames)


def test_the_digest_sees_every_tensor_and_the_header(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=30.0)
    driver.engine.admit(spec("a"), driver.now)
    driver.chunks("a", 2)
    driver.engine.suspend("a")
    driver.run()
    snapshot = driver.engine.snapshot("a")
    digests = {snapshot.digest()}
    for name in snapshot.tensors:
        tensors = {other: t.clone() for other, t in snapshot.tensors.items()}
        if not tensors[name].numel():
            continue
        tensors[name].view(-1).view(torch.uint8)[0] ^= 1
        digests.add(Snapshot(snapshot.header, tensors).digest())
    digests.add(Snapshot({**snapshot.header, "next_chunk": 3}, snapshot.tensors).digest())
    assert len(digests) == 2 + sum(t.numel() > 0 for t in snapshot.tensors.values())


def test_a_snapshot_of_another_model_is_refused_and_nothing_leaks(
    make_driver: MakeDriver, tiny_config: ModelConfig
) -> None:
    source = make_driver()
    source.engine.admit(spec("a"), source.now)
    source.chunks("a", 1)
    source.engine.suspend("a")
    source.run()
    snapshot = source.engine.snapshot("a")
    target = make_driver(slabs=1)
    other = Snapshot({**snapshot.header, "model": "other"}, snapshot.tensors)
    cut = Snapshot(snapshot.header, {**snapshot.tensors, "keys": snapshot.tensors["keys"][:, :1]})
    for bad, field in ((other, "model"), (cut, "keys")):
        with pytest.raises(SnapshotRejectedError, match=field):
            target.engine.admit(spec("a"), target.now, snapshot=bad)
        assert target.engine.free_slabs == 1


def test_a_full_host_pool_refuses_and_the_session_goes_on(make_driver: MakeDriver) -> None:
    driver = make_driver(host_bytes=1000, max_lead_s=30.0)
    driver.engine.admit(spec("a"), driver.now)
    driver.chunks("a", 1)
    driver.engine.suspend("a")
    events = driver.run(lambda e: len(of(ChunkReady, e)) == 1)
    assert [event.session for event in of(SuspendRefused, events)] == ["a"]
    assert "of 1000 free" in of(SuspendRefused, events)[0].reason
    assert [c.index for c in of(ChunkReady, events)] == [1]
    assert driver.engine.host_bytes_used == 0


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_lost_session_within_its_window_is_rebuilt_exactly(make_driver: MakeDriver, chunks: int) -> None:
    lost = make_driver(max_lead_s=30.0)
    lost.engine.admit(spec("a"), lost.now)
    made = lost.chunks("a", chunks + 2)

    driver = make_driver(max_lead_s=30.0)
    latents = torch.cat([c.latents for c in made[:chunks]])
    driver.engine.admit(spec("a", rebuild=Rebuild(chunks, latents)), driver.now)
    rebuilt = driver.chunks("a", 2)
    assert [c.index for c in rebuilt] == [chunks, chunks + 1]
    for ours, theirs in zip(rebuilt, made[chunks:], strict=True):
        # The noise depends only on seed and chunk, so the two differ only by rounding.
        assert torch.allclose(ours.latents, theirs.latents, atol=1e-5)
        assert ours.frames.shape == theirs.frames.shape


def test_a_lost_session_beyond_its_window_continues_where_it_was(make_driver: MakeDriver) -> None:
    lost = make_driver(max_lead_s=30.0)
    lost.engine.admit(spec("a"), lost.now)
    made = lost.chunks("a", 9)
    newest = torch.cat([c.latents for c in made[5:8]])
    errors = []
    for sink, oldest in ((None, [15, 16, 17]), (made[0].latents, [0, 1, 2])):
        driver = make_driver(max_lead_s=30.0)
        driver.engine.admit(spec("a", rebuild=Rebuild(8, newest, sink)), driver.now)
        chunk = driver.chunks("a", 1)[0]
        assert chunk.index == 8
        assert chunk.frames.shape[0] == 12
        frames = driver.engine.sessions["a"].state.ring.frames
        assert frames[:3] == oldest
        assert sorted(frames[3:]) == list(range(21, 27))
        errors.append((chunk.latents - made[8].latents).abs().mean())
    assert errors[1] < errors[0]


def test_bad_rebuilds_are_refused(make_driver: MakeDriver) -> None:
    driver = make_driver()
    good = torch.zeros(3, 16, 4, 4)
    for rebuild, message in (
        (Rebuild(1, torch.zeros(2, 16, 4, 4)), "latents: shape"),
        (Rebuild(1, torch.zeros(3, 16, 4, 5)), "latents: shape"),
        (Rebuild(0, good), "3 frames before chunk 0"),
        (Rebuild(1, good, torch.zeros(2, 16, 4, 4)), "sink: shape"),
    ):
        with pytest.raises(InvalidRebuildError, match=message):
            driver.engine.admit(spec("a", rebuild=rebuild), driver.now)
    assert driver.engine.free_slabs == 4


def test_refusals_are_typed(make_driver: MakeDriver) -> None:
    driver = make_driver(slabs=1)
    driver.engine.admit(spec("a"), driver.now)
    with pytest.raises(DuplicateSessionError):
        driver.engine.admit(spec("a"), driver.now)
    with pytest.raises(SlabsExhaustedError, match="none of 1 is free"):
        driver.engine.admit(spec("b"), driver.now)
    calls: tuple[Callable[[], object], ...] = (
        lambda: driver.engine.control("x", Control(1)),
        lambda: driver.engine.playhead("x", 0.0, now=0.0),
        lambda: driver.engine.suspend("x"),
        lambda: driver.engine.resume("a", 0.0),
        lambda: driver.engine.evict("x"),
        lambda: driver.engine.snapshot("a"),
    )
    for call in calls:
        with pytest.raises(UnknownSessionError):
            call()


def test_one_session_that_fails_harms_no_other(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=1.0)
    driver.engine.admit(spec("a"), driver.now)
    driver.engine.admit(spec("bad", prompt="raise"), driver.now)
    driver.engine.admit(spec("c"), driver.now)
    events = driver.run()
    failed = of(SessionFailed, events)
    assert [event.session for event in failed] == ["bad"]
    assert "text encoder fails" in failed[0].error
    assert {c.session for c in of(ChunkReady, events)} == {"a", "c"}
    assert driver.engine.free_slabs == 2


def test_a_session_ends_once_however_many_of_its_prompts_cannot_be_encoded(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=1.0)
    driver.engine.admit(spec("a"), driver.now)
    driver.run()
    for seq in (1, 2):
        driver.engine.control("a", Control(seq, prompt="raise"))
    assert [event.session for event in of(SessionFailed, driver.run())] == ["a"]


def test_a_session_without_a_window_ends_at_the_models_limit(
    make_driver: MakeDriver, tiny_config: ModelConfig
) -> None:
    values = {
        **vars(tiny_config),
        "local_attn_size": -1,
        "sink_size": 0,
        "max_frames": 7,
        "rotation": "absolute",
    }
    driver = make_driver(config=ModelConfig(**values), max_lead_s=30.0)
    driver.engine.admit(spec("a"), driver.now)
    events = driver.run()
    assert [c.index for c in of(ChunkReady, events)] == [0, 1]
    assert of(SessionEnded, events) == [SessionEnded("a", "frames: 9 wanted, the model's limit is 7")]


def test_memory_returns_to_its_baseline(make_driver: MakeDriver) -> None:
    driver = make_driver(slabs=2, max_lead_s=1.0)
    for round_ in range(3):
        for name in ("a", "b"):
            driver.engine.admit(spec(f"{name}{round_}"), driver.now)
        driver.run()
        driver.engine.suspend(f"a{round_}")
        driver.run()
        driver.engine.evict(f"a{round_}")
        driver.engine.evict(f"b{round_}")
        assert driver.engine.free_slabs == 2
        assert driver.engine.host_bytes_used == 0
    assert not driver.engine.sessions


def test_a_session_does_not_depend_on_its_neighbours(make_driver: MakeDriver) -> None:
    alone = make_driver(max_lead_s=30.0)
    alone.engine.admit(spec("a"), alone.now)
    expected = alone.chunks("a", 6)

    crowd = make_driver(max_lead_s=30.0)
    crowd.engine.admit(spec("b", prompt="x", seed=2), crowd.now)
    crowd.chunks("b", 2)
    crowd.engine.admit(spec("a"), crowd.now)
    crowd.engine.admit(spec("c", prompt="y", seed=3), crowd.now)
    crowd.engine.control("b", Control(1, prompt="z"))
    for ours, theirs in zip(crowd.chunks("a", 6), expected, strict=True):
        # Not bit-equal: a matrix product over more rows may be blocked differently.
        assert torch.allclose(ours.latents, theirs.latents, atol=1e-5)


def test_a_session_that_leaves_is_not_left_waiting_in_the_middle_of_a_chunk(make_driver: MakeDriver) -> None:
    """Incident: the slot of a suspended session was never freed, because viewers of others always waited."""
    driver = make_driver(max_lead_s=1e9, policy="tiers", profiles={"forward": {1: 0.3}})
    driver.engine.admit(spec("left"), driver.now)
    driver.chunks("left", 20)
    driver.run(lambda _: driver.engine.sessions["left"].work.done == 1)
    driver.engine.admit(spec("late"), driver.now)
    driver.engine.suspend("left")
    events: list[Any] = []
    began: float = driver.now
    while not of(Suspended, events):
        assert driver.now < began + 30.0
        if driver.engine.executors_busy:
            driver.engine.wait(120.0)
        # The viewer of the other session has always played all of its video.
        late = driver.engine.sessions["late"]
        end_s = driver.engine.config.media_start(late.delivered)
        driver.engine.playhead("late", end_s, now=driver.now)
        events += driver.engine.step(driver.now)
        driver.now += 0.3
    assert driver.now > began + 5.0
    assert of(ChunkReady, events)[-1].session == "left"
