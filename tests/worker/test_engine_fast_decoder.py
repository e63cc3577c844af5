"""Two decoders of one model: a chunk's configuration says which one decodes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.worker.conftest import Driver, delivered
from tests.worker.state_page_helpers import copy, equal, frozen
from turboserve.worker.engine.decode_jobs import is_fast, rebuilt_cache
from turboserve.worker.engine.decoding_here import WARM_CHUNKS
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.engine.interface import (
    ChunkReady,
    Control,
    Decoder,
    EngineOptions,
    Event,
    SessionSpec,
    Suspended,
)
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.receive_buffer import PagedReceiveBuffer
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.taehv import Taehv, TaehvConfig, TaehvDecoder
from turboserve.worker.model.wan_vae import WanDecoder, WanVae
from turboserve.worker.model.wan_vae_config import WanVaeConfig

CPU = torch.device("cpu")
TURNS = (False, True, True, False, True, False, False)
"""Whether each chunk is decoded by the fast decoder."""


@pytest.fixture
def decoders(tiny_config: ModelConfig) -> tuple[Decoder, Decoder]:
    torch.manual_seed(4)
    height, width = tiny_config.latent_height, tiny_config.latent_width
    vae = WanVae(WanVaeConfig(base_dim=4)).requires_grad_(False)
    for name, parameter in vae.named_parameters():
        nn.init.normal_(parameter, 1.0 if name.endswith("gamma") else 0.0, 0.15)
    tiny = Taehv(TaehvConfig(widths=(16, 12, 8, 8))).requires_grad_(False)
    for parameter in tiny.parameters():
        parameter.mul_(1.6)
    nn.init.constant_(tiny.get_parameter(f"decoder.{len(tiny.decoder) - 1}.bias"), 0.5)
    return WanDecoder(vae, height, width), TaehvDecoder(tiny, height, width)


@pytest.fixture
def make(
    tiny_config: ModelConfig, make_models: Callable[..., Models], decoders: tuple[Decoder, Decoder]
) -> Callable[..., Driver]:
    """Make a driver of an engine with both decoders, or with the first alone."""

    def made(*, both: bool = True, **options: Any) -> Driver:
        models = dataclasses.replace(
            make_models(tiny_config), decoder=decoders[0], fast_decoder=decoders[1] if both else None
        )
        slab_bytes = 2 * SlabLayout.of(tiny_config, torch.float32).total_bytes
        return Driver(models, EngineOptions(slab_bytes, max_lead_s=100.0, **options))

    return made


def configuration(config: ModelConfig, fast: bool) -> Fidelity:
    return dataclasses.replace(Fidelity.best(config), fast_decoder=fast)


def admit(driver: Driver, name: str, seed: int, fast: bool) -> None:
    chosen = configuration(driver.engine.config, fast)
    driver.engine.admit(SessionSpec(name, f"prompt of {name}", seed, fidelity=chosen), driver.now)


def chunks(driver: Driver, session: str, turns: Sequence[bool]) -> list[ChunkReady]:
    """The next chunks of the session, each with the decoder of its turn."""
    found: list[ChunkReady] = []
    for fast in turns:
        driver.engine.control(session, Control(0, fidelity=configuration(driver.engine.config, fast)))
        found += next_chunk(driver, session)
    return found


def next_chunk(driver: Driver, session: str) -> list[ChunkReady]:
    """Let the session begin and finish one chunk, and no other."""
    held = driver.engine.sessions[session]
    before = held.state.next_chunk
    events: list[Event] = []
    while not (made := delivered(events, session)):
        held.max_lead_s = 100.0 if held.state.next_chunk == before else 0.0
        events += driver.engine.step(driver.now)
        driver.now += 0.001
    return made


def test_each_chunk_is_decoded_by_the_decoder_of_its_configuration(
    make: Callable[..., Driver], decoders: tuple[Decoder, Decoder]
) -> None:
    driver, plain = make(), make(both=False)
    admit(driver, "s", 1, TURNS[0])
    admit(plain, "s", 1, False)
    made, alone = chunks(driver, "s", TURNS), chunks(plain, "s", [False] * len(TURNS))
    cache: dict[str, Tensor] | None = None
    by: bool | None = None
    for place, (chunk, other, fast) in enumerate(zip(made, alone, TURNS, strict=True)):
        assert chunk.fidelity is not None
        assert (chunk.index, chunk.fidelity.fast_decoder) == (place, fast)
        assert torch.equal(chunk.latents, other.latents)
        decoder = decoders[fast]
        if place and by != fast:
            context = [each.latents for each in made[max(0, place - WARM_CHUNKS) : place]]
            cache = rebuilt_cache(decoder, context, CPU)
        frames, [cache] = decoder.decode(chunk.latents.unsqueeze(0), None if cache is None else [cache])
        assert torch.equal(chunk.frames, frames[0])
        assert chunk.frames.shape == other.frames.shape
        assert not fast or not torch.equal(chunk.frames, other.frames)
        by = fast


def test_a_switch_without_a_warm_decoder_would_show(
    make: Callable[..., Driver], decoders: tuple[Decoder, Decoder]
) -> None:
    """What the warming is for: the first frames after a switch depend on the chunks before."""
    driver = make()
    admit(driver, "s", 1, False)
    *before, chunk = chunks(driver, "s", [False, False, True])
    whole: dict[str, Tensor] | None = None
    for each in [*before, chunk]:
        expected, [whole] = decoders[1].decode(each.latents.unsqueeze(0), None if whole is None else [whole])
    assert torch.equal(chunk.frames, expected[0])
    cold, _ = decoders[1].decode(chunk.latents.unsqueeze(0), None)
    assert not torch.equal(chunk.frames[-cold.shape[1] :], cold[0])


def test_a_session_takes_its_cache_along(make: Callable[..., Driver]) -> None:
    """Suspended and resumed elsewhere while the fast decoder has its cache: bit for bit the same video."""
    stays, source, target = make(), make(host_bytes=1 << 22), make()
    for driver in (stays, source):
        admit(driver, "s", 2, False)
    expected = chunks(stays, "s", [False, True, True, False])
    found = chunks(source, "s", [False, True])
    source.engine.suspend("s")
    source.run(lambda events: any(isinstance(event, Suspended) for event in events))
    snapshot: Snapshot = source.engine.snapshot("s")
    assert is_fast({name.removeprefix("decoder."): t for name, t in snapshot.tensors.items()})
    target.engine.admit(SessionSpec("s", ""), target.now, snapshot)
    found += chunks(target, "s", [True, False])
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.frames, other.frames)
        assert one.fidelity == other.fidelity


@pytest.mark.parametrize("begins_fast", [False, True])
def test_a_switch_during_a_migration_leaves_one_cache(make: Callable[..., Driver], begins_fast: bool) -> None:
    """A first round may bring the cache of one decoder, and the last one that of the other."""
    stays, source, target = make(), make(), make()
    for driver in (stays, source):
        admit(driver, "a", 2, begins_fast)
    expected = chunks(stays, "a", [begins_fast] * 2 + [not begins_fast] * 3)
    found = chunks(source, "a", [begins_fast] * 2)
    buffer = target.engine.reserve(on_host=False)
    assert isinstance(buffer, PagedReceiveBuffer)
    copy(source.engine.pages("a"), buffer)
    found += chunks(source, "a", [not begins_fast])
    frozen(source)
    header, pages = source.engine.export_session("a")
    copy(pages, buffer)
    # There is memory for one cache.
    caches = sum(page.size for page in pages if page.name.startswith("decoder."))
    others = [page for page in pages if page.shape and not page.name.startswith(("decoder.", "recent/"))]
    recent = source.engine.config.window_frames // source.engine.config.frames_per_chunk + 2
    latents = 4 * torch.Size(source.engine.config.latent_shape).numel()
    assert buffer.own_bytes <= caches + sum(page.size for page in others) + recent * latents
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    target.engine.unquiesce("a")
    found += chunks(target, "a", [not begins_fast] * 2)
    assert equal(found, expected)


def test_rows_of_one_batch_may_have_different_decoders(make: Callable[..., Driver]) -> None:
    both, alone = make(decode_batch=2), {name: make() for name in ("slow", "fast")}
    for number, name in enumerate(alone):
        for driver in (both, alone[name]):
            admit(driver, name, number, name == "fast")
    batches: list[int] = []
    decode = both.engine.backend.decode

    def counted(batch: Any) -> Any:
        batches.append(len({each.is_fast for each in batch}))
        return decode(batch)

    both.engine.backend.decode = counted  # type: ignore[method-assign]
    events = both.run(lambda events: all(len(delivered(events, name)) >= 3 for name in alone))
    assert max(batches) == 2
    for name, driver in alone.items():
        for one, other in zip(delivered(events, name)[:3], driver.chunks(name, 3), strict=True):
            assert (one.frames.int() - other.frames.int()).abs().max() <= 1


def test_only_the_usual_decoder_refines_the_latency_of_a_chunk(make: Callable[..., Driver]) -> None:
    driver = make()
    admit(driver, "s", 1, False)
    observed: list[int] = []
    profile = driver.engine.decode.profile
    profile.observe = lambda batch, seconds: observed.append(batch)  # type: ignore[method-assign]
    counts = []
    for fast in (False, False, True, True, False, False):
        chunks(driver, "s", [fast])
        counts.append(len(observed))
    # The first chunk, the fast ones and the one that warms the decoder again do not count.
    assert counts == [0, 1, 1, 1, 1, 2]


def test_memory_is_planned_for_the_larger_of_both(
    make_models: Callable[..., Models], tiny_config: ModelConfig, decoders: tuple[Decoder, Decoder]
) -> None:
    whole, fast = decoders
    one = dataclasses.replace(make_models(tiny_config), decoder=fast)
    two = dataclasses.replace(one, fast_decoder=whole)
    assert two.weight_bytes == one.weight_bytes + whole.weight_bytes
    assert (one.cache_bytes, two.cache_bytes) == (fast.cache_bytes, max(fast.cache_bytes, whole.cache_bytes))
    engine = Engine(two, EngineOptions(SlabLayout.of(tiny_config, torch.float32).total_bytes))
    alone = Engine(one, EngineOptions(SlabLayout.of(tiny_config, torch.float32).total_bytes))
    more = engine.backend.state_host_bytes - alone.backend.state_host_bytes
    assert more >= two.cache_bytes - one.cache_bytes > 0


def test_a_worker_with_one_decoder_ignores_the_other(
    make: Callable[..., Driver], tiny_config: ModelConfig
) -> None:
    driver, plain = make(both=False), make(both=False)
    admit(driver, "s", 1, True)
    admit(plain, "s", 1, False)
    for one, other in zip(driver.chunks("s", 3), plain.chunks("s", 3), strict=True):
        assert torch.equal(one.frames, other.frames)


def test_a_configuration_without_it_reads_as_before(tiny_config: ModelConfig) -> None:
    best = Fidelity.best(tiny_config)
    assert best.to_mapping() == {"steps": 4, "window_chunks": 2, "sparsity": 0.0}
    fast = configuration(tiny_config, True)
    assert Fidelity(**fast.to_mapping()) == fast != best
    assert fast.label == f"{best.label}, fast decoder"
