"""Configurations of chunks: fewer steps, a window that is masked when read, sparse attention."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.worker.state_page_helpers import copy, frozen
from tests.worker.test_engine_ring import HEADS, LAYERS, TOKENS, WIDTH, NaiveWindow, histories, ring_of
from turboserve.worker.engine.errors import InvalidFidelityError, InvalidRebuildError, SnapshotRejectedError
from turboserve.worker.engine.fidelity import (
    LARGEST_BLOCK,
    Fidelity,
    block_size,
    most_chunks,
    step_indices,
)
from turboserve.worker.engine.interface import ChunkReady, Control, Rebuild, SessionSpec, Step
from turboserve.worker.engine.kv_ring import attention
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.sparse_attention import sparse_attention
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.rope import Rotation

MakeDriver = Callable[..., Any]
CHEAP = Fidelity(2, 1, 0.5)


def spec(name: str, fidelity: Fidelity | None = None, seed: int = 1) -> SessionSpec:
    return SessionSpec(name, f"prompt of {name}", seed, fidelity=fidelity)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories(), st.data())
def test_a_reduced_window_equals_the_whole_one_with_masked_keys(
    history: tuple[ModelConfig, list[str], int], data: st.DataObject
) -> None:
    """Every chunk has a window of its own, and the frames that it does not read stay for the next chunk."""
    config, events, seed = history
    torch.manual_seed(seed)
    ring, rotation = ring_of(config), Rotation(config)
    naive = [NaiveWindow(config) for _ in range(LAYERS)]
    sink = config.sink_size if config.local_attn_size != -1 else 0
    count = config.frames_per_chunk
    for first in range(0, count * len(events), count):
        chunks = data.draw(st.integers(1, most_chunks(config)))
        placement = ring.reduced(ring.place(first, count), Fidelity(1, chunks), count)
        assert len(placement.reads) <= 3
        masked = frozenset(range(sink, max(sink, first + count - chunks * count)))
        for layer in range(LAYERS):
            q, k, v = torch.randn(3, count * TOKENS, HEADS, WIDTH)
            found = ring.attend(layer, placement, q[None], k[None], v[None])
            naive[layer].write(first, k, v)
            assert torch.allclose(found, naive[layer].attend(q, rotation, masked), atol=2e-5)


def test_the_largest_window_reads_in_place(tiny_config: ModelConfig) -> None:
    ring = ring_of(tiny_config)
    for first in range(0, 30, 3):
        placement = ring.place(first, 3)
        assert ring.reduced(placement, Fidelity.best(tiny_config), 3) == placement


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.6, 0.9, 0.99])
def test_sparse_attention_equals_dense_attention_with_masked_blocks(sparsity: float) -> None:
    torch.manual_seed(3)
    block, blocks, heads = 4, 9, 3
    q = torch.randn(1, 10, heads, 8)
    k, v = torch.randn(2, 1, heads, block * blocks, 8)
    mask = torch.zeros(heads, 10, block * blocks, dtype=torch.bool)
    for head in range(heads):
        means = [k[0, head, i * block : (i + 1) * block].mean(0) for i in range(blocks)]
        scores = [float(q[0, :, head].mean(0) @ mean) for mean in means]
        best = sorted(range(blocks), key=lambda i: -scores[i])[: blocks - int(blocks * sparsity)]
        assert best
        for i in best:
            mask[head, :, i * block : (i + 1) * block] = True
    expected = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask[None])
    found = sparse_attention(q, k, v, sparsity, block, attention)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)
    dense = F.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)
    assert torch.equal(found, dense) == (sparsity == 0)


@given(st.integers(1, 4000))
def test_a_block_divides_every_frame(tokens: int) -> None:
    size = block_size(tokens)
    assert 1 <= size <= LARGEST_BLOCK
    assert tokens % size == 0


@given(st.integers(1, 20), st.data())
def test_fewer_steps_are_a_part_of_the_models_own_and_begin_with_its_first(
    whole: int, data: st.DataObject
) -> None:
    steps = data.draw(st.integers(1, whole))
    taken = step_indices(steps, whole)
    assert (len(set(taken)), taken[0]) == (steps, 0)
    assert list(taken) == sorted(taken)
    assert taken[-1] < whole
    assert step_indices(whole, whole) == tuple(range(whole))


def chunks_of(driver: Any, names: dict[str, Fidelity | None], count: int) -> dict[str, list[ChunkReady]]:
    for number, (name, fidelity) in enumerate(names.items()):
        driver.engine.admit(spec(name, fidelity, seed=number), driver.now)
    found: dict[str, list[ChunkReady]] = {name: [] for name in names}

    def enough(events: list[Any]) -> bool:
        made = [event for event in events if isinstance(event, ChunkReady)]
        return all(sum(e.session == name for e in made) >= count for name in names)

    for event in driver.run(enough):
        if isinstance(event, ChunkReady):
            found[event.session].append(event)
    return {name: made[:count] for name, made in found.items()}


@pytest.mark.parametrize("attention", ["rows", "varlen"])
def test_rows_of_one_batch_differ_in_configuration(make_driver: MakeDriver, attention: str) -> None:
    """A session's chunks are those that it has alone, whatever the configurations beside it are."""
    names = {"best": None, "cheap": CHEAP, "short": Fidelity(4, 1), "sparse": Fidelity(4, 2, 0.7)}
    together = chunks_of(make_driver(max_lead_s=30.0, attention=attention), names, 5)
    for number, (name, fidelity) in enumerate(names.items()):
        alone = make_driver(max_lead_s=30.0)
        alone.engine.admit(spec(name, fidelity, seed=number), alone.now)
        for ours, theirs in zip(together[name], alone.chunks(name, 5), strict=True):
            assert (ours.index, ours.fidelity) == (theirs.index, fidelity)
            assert torch.allclose(ours.latents, theirs.latents, atol=1e-4)
    last = [made[-1].latents for made in together.values()]
    assert all(not torch.allclose(a, b, atol=1e-2) for i, a in enumerate(last) for b in last[:i])


def test_a_chunk_has_the_forwards_of_its_configuration(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=30.0)
    driver.engine.records_steps = True
    found = chunks_of(driver, {"best": None, "cheap": CHEAP}, 2)

    def forwards(chunk: ChunkReady) -> list[Step]:
        return [step for step in chunk.timings.steps if step.stage == "denoise"]

    assert [len(forwards(chunk)) for chunk in found["best"]] == [4, 4]
    assert [len(forwards(chunk)) for chunk in found["cheap"]] == [2, 2]


def test_a_control_changes_the_configuration_at_a_boundary(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=2.0)
    driver.engine.admit(spec("a"), driver.now)
    assert [e.fidelity for e in driver.run() if isinstance(e, ChunkReady)] == [None, None, None]
    best = Fidelity.best(driver.engine.config)
    for number, fidelity in enumerate((CHEAP, best), start=1):
        driver.engine.control("a", Control(number, fidelity=fidelity))
        driver.engine.playhead("a", 0.75 * number, now=driver.now, playing=False)
        assert [e.fidelity for e in driver.run() if isinstance(e, ChunkReady)] == [fidelity]


def test_a_snapshot_keeps_the_configuration_and_continues_bit_for_bit(make_driver: MakeDriver) -> None:
    source = make_driver(max_lead_s=30.0)
    source.engine.admit(spec("a", CHEAP), source.now)
    source.chunks("a", 5)
    source.engine.suspend("a")
    source.run()
    snapshot = source.engine.snapshot("a")
    held = Snapshot(dict(snapshot.header), {name: t.clone() for name, t in snapshot.tensors.items()})
    target = make_driver(max_lead_s=30.0)
    target.engine.admit(spec("a"), target.now, snapshot=held)
    source.engine.resume("a", source.now)
    for ours, theirs in zip(target.chunks("a", 3), source.chunks("a", 3), strict=True):
        assert (ours.index, ours.fidelity) == (theirs.index, CHEAP)
        assert torch.equal(ours.latents, theirs.latents)

    for field, wrong in (("floor", 2.0), ("floor", "low"), ("pinned", 1)):
        other = make_driver(slabs=1)
        with pytest.raises(SnapshotRejectedError, match=field):
            other.engine.admit(
                spec("a"), other.now, snapshot=Snapshot({**held.header, field: wrong}, held.tensors)
            )
        assert other.engine.free_slabs == 1
    for bad in ({**dataclasses.asdict(CHEAP), "steps": 9}, {"speed": 1}, "fast"):
        other = make_driver(slabs=1)
        with pytest.raises(SnapshotRejectedError, match="fidelity"):
            other.engine.admit(
                spec("a"), other.now, snapshot=Snapshot({**held.header, "fidelity": bad}, held.tensors)
            )
        assert other.engine.free_slabs == 1


def test_a_sessions_limits_follow_it_into_a_snapshot_and_a_migration(make_driver: MakeDriver) -> None:
    source, target = (make_driver(max_lead_s=30.0) for _ in range(2))
    source.engine.admit(dataclasses.replace(spec("a"), floor=0.7), source.now)
    source.chunks("a", 1)
    source.engine.control("a", Control(1, pinned=True))
    source.engine.control("a", Control(2, max_lead_s=20.0))
    source.chunks("a", 2)
    frozen(source)
    header, pages = source.engine.export_session("a")
    assert (header["floor"], header["pinned"]) == (0.7, True)
    buffer = target.engine.reserve(on_host=False)
    buffer.begin()
    copy(pages, buffer)
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    target.engine.unquiesce("a")
    target.engine.control("a", Control(3, floor=0.0, pinned=False))
    state = target.engine.sessions["a"].state
    assert (state.floor, state.pinned) == (0.7, True)
    target.chunks("a", 3)
    assert (state.floor, state.pinned) == (0.0, False)


@pytest.mark.parametrize("floor", [-0.1, 1.5, float("nan"), True, "low"])
def test_a_floor_outside_its_range_is_refused(make_driver: MakeDriver, floor: Any) -> None:
    driver = make_driver(slabs=1, max_lead_s=2.0)
    with pytest.raises(InvalidFidelityError, match=r"floor: .* must be in 0\.\.1"):
        driver.engine.admit(dataclasses.replace(spec("a"), floor=floor), driver.now)
    driver.engine.admit(spec("a"), driver.now)
    with pytest.raises(InvalidFidelityError, match="floor"):
        driver.engine.control("a", Control(1, floor=floor))


@pytest.mark.parametrize("count", [2, 3])
def test_a_rebuild_repeats_each_chunk_at_its_own_configuration(make_driver: MakeDriver, count: int) -> None:
    """The clean pass of a chunk reads what its configuration reads, so its keys and values depend on it."""
    changes = [CHEAP, Fidelity(3, 1), Fidelity(4, 2, 0.7), None, CHEAP]
    lost = make_driver(max_lead_s=0.1)
    lost.engine.admit(spec("a", changes[0]), lost.now)
    made = [event for event in lost.run() if isinstance(event, ChunkReady)]
    best, start = Fidelity.best(lost.engine.config), lost.engine.config.media_start
    for number, fidelity in enumerate(changes[1:], start=1):
        lost.engine.control("a", Control(number, fidelity=fidelity or best))
        lost.engine.playhead("a", start(number), now=lost.now, playing=False)
        made += [event for event in lost.run() if isinstance(event, ChunkReady)]
    assert [chunk.fidelity for chunk in made] == [fidelity or best for fidelity in changes]

    latents = torch.cat([chunk.latents for chunk in made[:count]])
    errors = []
    for fidelities in (tuple(chunk.fidelity for chunk in made[:count]), ()):
        driver = make_driver(max_lead_s=0.1)
        rebuild = Rebuild(count, latents, fidelities=fidelities)
        again = dataclasses.replace(spec("a", made[count].fidelity), rebuild=rebuild)
        driver.engine.admit(again, driver.now)
        driver.engine.playhead("a", start(count), now=driver.now, playing=False)
        [found] = [event for event in driver.run() if isinstance(event, ChunkReady)]
        assert (found.index, found.fidelity) == (count, made[count].fidelity)
        errors.append(float((found.latents - made[count].latents).abs().max()))
    assert errors[0] == 0.0, errors
    assert errors[1] > 1e-5


def test_a_rebuild_repeats_the_sink_at_the_configuration_of_chunk_0(make_driver: MakeDriver) -> None:
    """Chunk 0 has left the kept chunks, and each later chunk has attended to its keys as they were."""
    source = make_driver(max_lead_s=0.1)
    source.engine.admit(spec("a", CHEAP), source.now)
    made = [event for event in source.run() if isinstance(event, ChunkReady)]
    best, start = Fidelity.best(source.engine.config), source.engine.config.media_start
    for number, fidelity in enumerate((Fidelity(3, 1, 0.7), best, Fidelity(4, 2, 0.7)), start=1):
        source.engine.control("a", Control(number, fidelity=fidelity))
        source.engine.playhead("a", start(number), now=source.now, playing=False)
        made += [event for event in source.run() if isinstance(event, ChunkReady)]
    state = source.engine.sessions["a"].state
    assert state.ring.frames == [0, 1, 2, 9, 10, 11, 6, 7, 8]
    before = {name: getattr(state.slab, name).clone() for name in ("keys", "values", "sink_keys")}
    source.engine.playhead("a", start(4), now=source.now, playing=False)
    [following] = [event for event in source.run() if isinstance(event, ChunkReady)]

    kept, latents = made[1:], torch.cat([chunk.latents for chunk in made[1:]])
    for sink_fidelity, same in ((CHEAP, True), (None, False)):
        driver = make_driver(max_lead_s=0.1)
        fidelities = tuple(each.fidelity for each in kept)
        rebuild = Rebuild(4, latents, made[0].latents, fidelities, sink_fidelity)
        driver.engine.admit(dataclasses.replace(spec("a", kept[-1].fidelity), rebuild=rebuild), driver.now)
        assert not [event for event in driver.run() if isinstance(event, ChunkReady)]
        rebuilt = driver.engine.sessions["a"].state
        assert rebuilt.ring.frames == [0, 1, 2, 9, 10, 11, 6, 7, 8]
        for name, tensor in before.items():
            assert torch.equal(getattr(rebuilt.slab, name), tensor) is same, name
        driver.engine.playhead("a", start(4), now=driver.now, playing=False)
        [found] = [event for event in driver.run() if isinstance(event, ChunkReady)]
        assert (found.index, found.fidelity) == (4, following.fidelity)
        assert torch.equal(found.latents, following.latents) is same


def test_a_rebuilt_session_goes_on_from_its_newest_configuration(make_driver: MakeDriver) -> None:
    source = make_driver(max_lead_s=30.0)
    source.engine.admit(spec("a", CHEAP), source.now)
    latents = torch.cat([chunk.latents for chunk in source.chunks("a", 2)])
    driver = make_driver(max_lead_s=30.0)
    rebuild = Rebuild(2, latents, fidelities=(None, CHEAP))
    driver.engine.admit(dataclasses.replace(spec("a"), rebuild=rebuild), driver.now)
    assert driver.engine.sessions["a"].state.fidelity == CHEAP
    # The policy decides the next chunk: the default takes the best.
    assert driver.chunks("a", 1)[0].fidelity is None
    for wrong, sink, error in (
        ((CHEAP,), None, InvalidRebuildError),
        ((None, Fidelity(9, 1)), None, InvalidFidelityError),
        ((None, CHEAP), Fidelity(9, 1), InvalidFidelityError),
    ):
        bad = Rebuild(2, latents, fidelities=wrong, sink_fidelity=sink)
        with pytest.raises(error):
            driver.engine.admit(dataclasses.replace(spec("b"), rebuild=bad), driver.now)
        assert not driver.engine.knows("b")


def test_reduced_forwards_leave_the_profile_of_the_best_configuration(make_driver: MakeDriver) -> None:
    driver = make_driver(max_lead_s=30.0)
    driver.engine.admit(spec("a", CHEAP), driver.now)
    driver.chunks("a", 4)
    assert driver.engine.forward.profile.to_mapping() == {}
    driver.engine.control("a", Control(1, fidelity=Fidelity.best(driver.engine.config)))
    driver.chunks("a", 4)
    assert set(driver.engine.forward.profile.to_mapping()) == {1}


def test_a_migration_takes_the_configuration_along(make_driver: MakeDriver) -> None:
    source, target = (make_driver(max_lead_s=30.0) for _ in range(2))
    source.engine.admit(spec("a", CHEAP), source.now)
    source.chunks("a", 4)
    frozen(source)
    header, pages = source.engine.export_session("a")
    buffer = target.engine.reserve(on_host=False)
    buffer.begin()
    copy(pages, buffer)
    with pytest.raises(SnapshotRejectedError, match="fidelity"):
        buffer.check({**header, "fidelity": {"steps": 9}}, [page.name for page in pages])
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    for driver in (source, target):
        driver.engine.unquiesce("a")
    for ours, theirs in zip(target.chunks("a", 3), source.chunks("a", 3), strict=True):
        assert (ours.index, ours.fidelity) == (theirs.index, CHEAP)
        assert torch.equal(ours.latents, theirs.latents)


@pytest.mark.parametrize(
    ("fidelity", "field"),
    [
        (Fidelity(2.5, 1), "steps: 2.5 must be in 1..4"),  # type: ignore[arg-type]
        (Fidelity(0, 1), "steps: 0 must be in 1..4"),
        (Fidelity(5, 1), "steps: 5 must be in 1..4"),
        (Fidelity(4, 3), "window_chunks: 3 must be in 1..2"),
        (Fidelity(4, 0), "window_chunks: 0 must be in 1..2"),
        (Fidelity(4, 2, 1.0), "sparsity: 1.0 must be at least 0 and below 1"),
        (Fidelity(4, 2, float("nan")), "sparsity: nan must be at least 0 and below 1"),
    ],
)
def test_a_configuration_that_the_model_lacks_is_refused(
    make_driver: MakeDriver, fidelity: Fidelity, field: str
) -> None:
    driver = make_driver(slabs=1, max_lead_s=2.0)
    with pytest.raises(InvalidFidelityError, match=field):
        driver.engine.admit(spec("a", fidelity), driver.now)
    driver.engine.admit(spec("a"), driver.now)
    with pytest.raises(InvalidFidelityError, match=field):
        driver.engine.control("a", Control(1, fidelity=fidelity))
    assert [e.fidelity for e in driver.run() if isinstance(e, ChunkReady)] == [None, None, None]
