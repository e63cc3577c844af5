"""One session's forwards computed by two workers: equal to one worker's, and complete at home."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.worker.parallel_pairs import LocalDonor
from turboserve.worker.engine import models
from turboserve.worker.engine.errors import (
    DonorReleasedError,
    PartnerLostError,
    SequenceParallelUnavailableError,
)
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.interface import ChunkReady, Control, EngineOptions, SessionSpec
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.sequence_parallel import DONOR, HOME, Split
from turboserve.worker.engine.sequence_parallel_sizes import exchanged_bytes, lent_bytes
from turboserve.worker.engine.tensor_backend import TensorBackend
from turboserve.worker.model.config import ModelConfig

MakeDriver = Callable[..., Any]


def parallel(driver: Any) -> Any:
    assert isinstance(driver.engine.backend, TensorBackend)
    return driver.engine.backend.parallel


def begun(driver: Any, fidelity: Fidelity | None = None) -> Any:
    """Admit the session, and take it to its first boundary."""
    driver.engine.admit(SessionSpec("s", "a prompt", 3, fidelity=fidelity), driver.now)
    driver.engine.playhead("s", 1e6, now=driver.now)
    return driver.engine.sessions["s"].state


def ring_of(state: Any) -> list[torch.Tensor]:
    return [state.ring.filled()[name] for name in ("keys", "values", "sink_keys")]


VARIANTS: list[dict[str, Any]] = [
    {},
    {"rotation": "absolute"},
    {"local_attn_size": -1, "sink_size": 0, "rotation": "absolute", "max_frames": 30},
    {"num_heads": 3},
    {"latent_width": 6, "latent_height": 6, "frames_per_chunk": 2},
    {"sink_size": 4, "local_attn_size": 8, "frames_per_chunk": 3, "rotation": "absolute"},
]


@pytest.mark.parametrize("fidelity", [None, Fidelity(2, 2, 0.5)])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_two_workers_compute_the_chunks_and_the_ring_of_one(
    make_driver: MakeDriver, tiny_config: ModelConfig, changes: dict[str, Any], fidelity: Fidelity | None
) -> None:
    config = dataclasses.replace(tiny_config, **changes)
    alone, home, donor = (make_driver(config=config) for _ in range(3))
    lender = LocalDonor(parallel(donor))
    states = [begun(driver, fidelity) for driver in (alone, home)]
    lender.lend_to(parallel(home), states[1])
    for prompt in (None, "another prompt", None):
        chunks = []
        for driver in (alone, home):
            if prompt is not None:
                driver.engine.control("s", Control(1, prompt=prompt))
            chunks.append(driver.chunks("s", 3))
        for one, two in zip(*chunks, strict=True):
            assert one.index == two.index
            torch.testing.assert_close(one.latents, two.latents, atol=1e-5, rtol=1e-5)
        # What a migration would take is complete at home.
        for one, two in zip(ring_of(states[0]), ring_of(states[1]), strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    lender.end()
    assert not lender.broken
    assert len(lender.specs) > 9
    # L(b) is of one device alone.
    assert bool(alone.engine.forward.profile.to_mapping()) == (fidelity is None)
    assert not home.engine.forward.profile.to_mapping()
    # The cached keys and values went once, and the prompt whenever it was new.
    assert [spec.seeds for spec in lender.specs].count(True) == 1
    assert sum(spec.text_tokens > 0 for spec in lender.specs) == 2


def test_compiled_blocks_are_split_as_well(make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "COMPILER", "eager")
    alone, home, donor = make_driver(), make_driver(compile=True), make_driver(compile=True)
    states = [begun(driver) for driver in (alone, home)]
    lender = LocalDonor(parallel(donor))
    lender.lend_to(parallel(home), states[1])
    for one, two in zip(alone.chunks("s", 2), home.chunks("s", 2), strict=True):
        torch.testing.assert_close(one.latents, two.latents, atol=1e-5, rtol=1e-5)
    lender.end()
    assert not lender.broken
    assert len(lender.specs) >= 9


def test_a_donor_with_other_weights_gives_another_video(
    make_driver: MakeDriver, make_models: Callable[..., Any], tiny_config: ModelConfig
) -> None:
    """The comparison of the other tests sees what the donor computes."""
    alone, home = make_driver(), make_driver()
    options = EngineOptions(SlabLayout.of(tiny_config, torch.float32).total_bytes)
    donor = make_models(tiny_config, seed=6).backend(options)
    states = [begun(driver) for driver in (alone, home)]
    lender = LocalDonor(donor.parallel)
    lender.lend_to(parallel(home), states[1])
    one, two = (driver.chunks("s", 1)[0].latents for driver in (alone, home))
    lender.end()
    assert (one - two).abs().max() > 0.01


def test_declared_bytes_are_those_exchanged(make_driver: MakeDriver, tiny_config: ModelConfig) -> None:
    config = dataclasses.replace(tiny_config, num_heads=3, latent_height=6, latent_width=6)
    home, donor = make_driver(config=config), make_driver(config=config)
    lender = LocalDonor(parallel(donor))
    lender.lend_to(parallel(home), begun(home))
    home.chunks("s", 1)
    before = lender.home.bytes_sent + lender.donor.bytes_sent, len(lender.specs)
    home.chunks("s", 2)
    sent = lender.home.bytes_sent + lender.donor.bytes_sent - before[0]
    forwards = len(lender.specs) - before[1]
    lender.end()
    latents = torch.Size(config.latent_shape).numel() * 4
    theirs = Split.of(config).tokens_of(DONOR)
    channels = config.frames_per_chunk * (theirs.stop - theirs.start) * 4 * config.out_dim * 4
    per_forward = exchanged_bytes(config, config.frames_per_chunk, 4) + latents + channels + 1
    assert sent == forwards * per_forward


@pytest.mark.parametrize("error", [DonorReleasedError, PartnerLostError])
def test_a_loan_that_ends_inside_a_chunk_costs_one_repeated_forward(
    make_driver: MakeDriver, error: type[Exception]
) -> None:
    alone, home, donor = make_driver(), make_driver(), make_driver()
    states = [begun(driver) for driver in (alone, home)]
    lender = LocalDonor(parallel(donor))
    lender.lend_to(parallel(home), states[1])
    if error is PartnerLostError:
        # Within a layer of a later forward, after the donor has computed some of it.
        lender.home.fails_at = 17
    else:
        lender.accepts = False
    expected, found = alone.chunks("s", 3), home.chunks("s", 3)
    assert [type(each) for each in lender.broken] == [error]
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(one.latents, two.latents, atol=1e-5, rtol=1e-5)
    for one, two in zip(ring_of(states[0]), ring_of(states[1]), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    # A new loan of the same session begins with everything again.
    again = LocalDonor(parallel(donor))
    again.lend_to(parallel(home), states[1])
    torch.testing.assert_close(
        alone.chunks("s", 1)[0].latents, home.chunks("s", 1)[0].latents, atol=1e-5, rtol=1e-5
    )
    assert again.specs[0].seeds
    again.end()


def test_rows_of_other_sessions_are_computed_beside_the_borrowed_one(make_driver: MakeDriver) -> None:
    alone, home, donor = make_driver(), make_driver(), make_driver()
    states = []
    for driver in (alone, home):
        states.append(begun(driver))
        driver.engine.admit(SessionSpec("other", "other prompt", 4), driver.now)
        driver.engine.playhead("other", 1e6, now=driver.now)
    lender = LocalDonor(parallel(donor))
    lender.lend_to(parallel(home), states[1])

    def enough(events: list[Any]) -> bool:
        return all(
            sum(isinstance(event, ChunkReady) and event.session == name for event in events) >= 2
            for name in ("s", "other")
        )

    def by_chunk(driver: Any) -> dict[tuple[str, int], torch.Tensor]:
        events = driver.run(enough)
        return {(each.session, each.index): each.latents for each in events if isinstance(each, ChunkReady)}

    expected, found = by_chunk(alone), by_chunk(home)
    lender.end()
    assert lender.specs
    for key in expected.keys() & found.keys():
        torch.testing.assert_close(expected[key], found[key], atol=1e-5, rtol=1e-5)


def test_a_model_with_one_head_is_refused(tiny_config: ModelConfig) -> None:
    with pytest.raises(SequenceParallelUnavailableError, match="num_heads is 1"):
        Split.of(dataclasses.replace(tiny_config, num_heads=1))
    with pytest.raises(SequenceParallelUnavailableError, match="tokens_per_frame is 1"):
        Split.of(dataclasses.replace(tiny_config, latent_height=2, latent_width=2))


@pytest.mark.parametrize("count", [2, 3, 12, 1560])
def test_the_halves_cover_all_and_differ_by_at_most_one(count: int) -> None:
    split = Split(count, count)
    home, donor = split.tokens_of(HOME), split.tokens_of(DONOR)
    assert (home.start, donor.stop) == (0, count)
    assert home.stop == donor.start
    assert 0 <= (home.stop - home.start) - (donor.stop - donor.start) <= 1


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_donors_memory_is_what_the_formula_reserves(
    make_driver: MakeDriver, tiny_config: ModelConfig, changes: dict[str, Any]
) -> None:
    config = dataclasses.replace(tiny_config, **changes)
    memory = parallel(make_driver(config=config)).lent_memory()
    assert memory.allocated_bytes == lent_bytes(config, torch.float32)
