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
from turboserve.worker.engine.errors import InvalidFidelityError, SnapshotRejectedError
from turboserve.worker.engine.fidelity import (
    LARGEST_BLOCK,
    Fidelity,
    block_size,
    most_chunks,
    sparse_attention,
    step_indices,
)
from turboserve.worker.engine.interface import ChunkReady, Control, SessionSpec, Step
from turboserve.worker.engine.snapshot import Snapshot
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
    found = sparse_attention(q, k, v, sparsity, block)
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

    for bad in ({**dataclasses.asdict(CHEAP), "steps": 9}, {"speed": 1}, "fast"):
        other = make_driver(slots=1)
        with pytest.raises(SnapshotRejectedError, match="fidelity"):
            other.engine.admit(
                spec("a"), other.now, snapshot=Snapshot({**held.header, "fidelity": bad}, held.tensors)
            )
        assert other.engine.free_slots == 1


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
    driver = make_driver(slots=1, max_lead_s=2.0)
    with pytest.raises(InvalidFidelityError, match=field):
        driver.engine.admit(spec("a", fidelity), driver.now)
    driver.engine.admit(spec("a"), driver.now)
    with pytest.raises(InvalidFidelityError, match=field):
        driver.engine.control("a", Control(1, fidelity=fidelity))
    assert [e.fidelity for e in driver.run() if isinstance(e, ChunkReady)] == [None, None, None]
