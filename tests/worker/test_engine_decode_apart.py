"""An engine whose sessions have no decoder's caches: the same video, from other workers or from latents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.conftest import Driver
from tests.worker.state_page_helpers import FAR, SPEC, copy, equal, frozen, stayed
from turboserve.worker.engine.decode_jobs import (
    CacheApart,
    CachedDecoder,
    CacheTable,
    DecodeJob,
    digest_of_latents,
)
from turboserve.worker.engine.decoding_apart import OWN_CACHES
from turboserve.worker.engine.errors import InvalidRebuildError, SnapshotRejectedError
from turboserve.worker.engine.interface import (
    ChunkReady,
    Decoder,
    EngineOptions,
    Rebuild,
    SessionSpec,
    Suspended,
)
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.snapshot import APART_VERSION, DECODER, VERSION
from turboserve.worker.engine.tensor_backend import TensorBackend
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.toyworld import ToyDecoder, read_toyworld

MakeDriver = Callable[..., Any]
CPU = torch.device("cpu")
CHUNKS = 8
"""More than a window."""


class Elsewhere:
    """See `RemoteDecoder`: the decoder of a decode worker, in this process."""

    def __init__(self, decoder: Decoder, fails: Sequence[int] = (), forgets: Sequence[int] = ()) -> None:
        self.decoder = CachedDecoder(decoder, CPU, CacheTable(8))
        self.fails, self.forgets = fails, forgets
        self.decoded: list[int] = []
        self.rebuilt: list[int] = []

    def decode(self, jobs: Sequence[DecodeJob]) -> list[Tensor | None]:
        return [self._one(job) for job in jobs]

    def _one(self, job: DecodeJob) -> Tensor | None:
        if job.index in self.fails:
            return None
        if job.index in self.forgets:
            self.decoder.caches = CacheTable(8)
        if not self.decoder.has_cache(job):
            self.rebuilt.append(job.index)
        self.decoded.append(job.index)
        return self.decoder.decode(job)


def backend_of(driver: Any) -> TensorBackend:
    backend = driver.engine.backend
    assert isinstance(backend, TensorBackend)
    return backend


def elsewhere(driver: Any, **options: Any) -> Elsewhere:
    """Have the driver's chunks decoded elsewhere."""
    backend = backend_of(driver)
    assert backend.apart is not None
    remote = Elsewhere(backend.decoder, **options)
    backend.apart.remote = remote
    return remote


@pytest.fixture
def toy_models(tiny_config: ModelConfig, make_models: Callable[..., Models]) -> Callable[..., Models]:
    """Tiny models with toyworld's decoder, whose cache depends on the last latent frames only."""

    def make(config: ModelConfig = tiny_config) -> Models:
        return dataclasses.replace(make_models(config), decoder=ToyDecoder(read_toyworld().vae, config))

    return make


@pytest.fixture
def make_toy(toy_models: Callable[..., Models]) -> MakeDriver:
    """As `make_driver`, with `toy_models`."""

    def make(slabs: int = 2, **options: Any) -> Any:
        models = toy_models()
        slab_bytes = slabs * SlabLayout.of(models.transformer.config, torch.float32).total_bytes
        return Driver(models, EngineOptions(slab_bytes, **options))

    return make


def played(driver: Any, chunks: int = CHUNKS) -> list[ChunkReady]:
    driver.engine.admit(SPEC, driver.now)
    found: list[ChunkReady] = driver.chunks("a", chunks)
    return found


def test_chunks_that_are_decoded_elsewhere_are_the_same_bit_for_bit(make_driver: MakeDriver) -> None:
    expected = stayed(make_driver, CHUNKS)
    driver = make_driver(max_lead_s=FAR, decode_apart=True)
    remote = elsewhere(driver)
    assert equal(played(driver), expected)
    # This decoder's cache depends on every latent of the video: none was rebuilt on the way.
    assert remote.decoded == list(range(CHUNKS))
    assert remote.rebuilt == []
    assert isinstance(driver.engine.sessions["a"].state.decoder_cache, CacheApart)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_without_decode_workers_decodes_the_same_video_itself(
    make_driver: MakeDriver, *, overlap: bool
) -> None:
    driver = make_driver(max_lead_s=FAR, decode_apart=True, overlap=overlap)
    assert equal(played(driver), stayed(make_driver, CHUNKS))
    apart = backend_of(driver).apart
    assert apart is not None
    assert apart.decoded_here == CHUNKS


def test_more_sessions_than_own_caches_get_theirs_from_latents(make_toy: MakeDriver) -> None:
    sessions = [SessionSpec(name, "a red circle", seed=number) for number, name in enumerate("abcd")]
    assert len(sessions) > OWN_CACHES
    found = []
    for apart in (False, True):
        driver = make_toy(4, max_lead_s=FAR, decode_apart=apart)
        for spec in sessions:
            driver.engine.admit(spec, driver.now)
        chunks: dict[str, list[ChunkReady]] = {spec.session: [] for spec in sessions}

        def enough(events: list[Any], chunks: dict[str, list[ChunkReady]] = chunks) -> bool:
            for each in chunks.values():
                each.clear()
            for event in events:
                if isinstance(event, ChunkReady):
                    chunks[event.session].append(event)
            return min(map(len, chunks.values())) >= CHUNKS

        driver.run(enough)
        found.append({name: each[:CHUNKS] for name, each in chunks.items()})
    for name in found[0]:
        assert equal(found[0][name], found[1][name])


@pytest.mark.parametrize(
    ("fails", "forgets"),
    [([3], []), ([0], []), ([2, 3, 4], []), ([], [3]), ([], [1, 5]), ([2], [4])],
)
def test_a_decode_worker_that_fails_or_forgets_changes_no_pixel(
    make_toy: MakeDriver, fails: list[int], forgets: list[int]
) -> None:
    expected = played(make_toy(max_lead_s=FAR))
    driver = make_toy(max_lead_s=FAR, decode_apart=True)
    remote = elsewhere(driver, fails=fails, forgets=forgets)
    assert equal(played(driver), expected)
    assert remote.decoded == [index for index in range(CHUNKS) if index not in fails]
    after = [index + 1 for index in fails if index + 1 not in fails]
    assert remote.rebuilt == sorted({*after, *forgets})


def test_a_state_migrates_without_the_cache_which_stays_where_it_is(make_driver: MakeDriver) -> None:
    expected = stayed(make_driver, CHUNKS)
    source = make_driver(max_lead_s=FAR, decode_apart=True)
    remote = elsewhere(source)
    source.engine.admit(SPEC, source.now)
    before = source.chunks("a", 4)
    frozen(source)
    header, pages = source.engine.export_session("a")
    assert header["version"] == APART_VERSION
    assert not [page.name for page in pages if page.name.startswith(DECODER)]
    target = make_driver(max_lead_s=FAR, decode_apart=True)
    elsewhere(target).decoder = remote.decoder
    arrive(target, header, pages)
    following = int(header["next_chunk"])
    assert equal(before, expected[:4])
    assert equal(target.chunks("a", CHUNKS - following), expected[following:])
    assert remote.rebuilt == []


def arrive(target: Any, header: Any, pages: Any) -> None:
    buffer = target.engine.reserve(on_host=False)
    copy(pages, buffer)
    target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
    target.engine.unquiesce("a")


def test_a_worker_that_decodes_takes_over_from_one_that_does_not(make_toy: MakeDriver) -> None:
    expected = played(make_toy(max_lead_s=FAR))
    source = make_toy(max_lead_s=FAR, decode_apart=True)
    source.engine.admit(SPEC, source.now)
    source.chunks("a", 4)
    following = frozen(source)
    target = make_toy(max_lead_s=FAR)
    arrive(target, *source.engine.export_session("a"))
    assert equal(target.chunks("a", CHUNKS - following), expected[following:])
    # It has the cache from then on, and sends it along.
    frozen(target)
    header, pages = target.engine.export_session("a")
    assert header["version"] == VERSION
    assert [page.name for page in pages if page.name.startswith(DECODER)]


@pytest.mark.parametrize("on_host", [False, True])
def test_a_worker_that_does_not_decode_takes_over_from_one_that_does(
    make_toy: MakeDriver, *, on_host: bool
) -> None:
    expected = played(make_toy(max_lead_s=FAR))
    source = make_toy(max_lead_s=FAR, host_bytes=1 << 24)
    source.engine.admit(SPEC, source.now)
    source.chunks("a", 4)
    following = frozen(source)
    header, pages = source.engine.export_session("a")
    assert header["version"] == VERSION
    target = make_toy(max_lead_s=FAR, decode_apart=True, host_bytes=1 << 24)
    remote = elsewhere(target)
    if on_host:
        buffer = target.engine.reserve(on_host=True)
        copy(pages, buffer)
        target.engine.import_session(buffer, header, [page.name for page in pages], target.now)
        target.engine.resume("a", target.now)
    else:
        arrive(target, header, pages)
    # The cache that came along is not the decode worker's: that one rebuilds it from the latents.
    assert equal(target.chunks("a", CHUNKS - following), expected[following:])
    assert remote.rebuilt == [following]
    assert isinstance(target.engine.sessions["a"].state.decoder_cache, CacheApart)


def test_a_state_with_a_cache_does_not_fit_where_none_is_kept(make_driver: MakeDriver) -> None:
    source = make_driver(max_lead_s=FAR)
    source.engine.admit(SPEC, source.now)
    source.chunks("a", 2)
    frozen(source)
    header, pages = source.engine.export_session("a")
    assert header["version"] == VERSION
    target = make_driver(max_lead_s=FAR, decode_apart=True)
    buffer = target.engine.reserve(on_host=False)
    large = 1 << 30
    with pytest.raises(SnapshotRejectedError, match="bytes"):
        buffer.place(f"{DECODER}total", large, "uint8", (large,))
    with pytest.raises(SnapshotRejectedError, match="version"):
        buffer.check({**header, "version": 3}, [page.name for page in pages])


def test_a_suspended_session_continues_with_the_cache_that_was_never_here(make_driver: MakeDriver) -> None:
    expected = stayed(make_driver, CHUNKS)
    driver = make_driver(max_lead_s=FAR, decode_apart=True, host_bytes=1 << 24)
    remote = elsewhere(driver)
    driver.engine.admit(SPEC, driver.now)
    chunks = list(driver.chunks("a", 3))
    driver.engine.suspend("a")
    events = driver.run(lambda events: any(isinstance(event, Suspended) for event in events))
    chunks += [event for event in events if isinstance(event, ChunkReady)]
    assert not [name for name in driver.engine.snapshot("a").tensors if name.startswith(DECODER)]
    driver.engine.resume("a", driver.now)
    chunks += driver.chunks("a", CHUNKS - len(chunks))
    assert equal(chunks, expected)
    assert remote.rebuilt == []


def test_a_recovered_session_names_the_cache_of_the_worker_that_was_lost(make_driver: MakeDriver) -> None:
    first = make_driver(max_lead_s=FAR, decode_apart=True)
    remote = elsewhere(first)
    chunks = played(first)
    # The first worker is lost behind chunk 4. No viewer has the later ones.
    lost = 4
    kept = [each.latents for each in chunks[1:lost]]
    second = make_driver(max_lead_s=FAR, decode_apart=True)
    other = elsewhere(second)
    spec = dataclasses.replace(SPEC, rebuild=Rebuild(lost, torch.cat(kept)))
    second.engine.admit(spec, second.now)
    [following] = second.chunks("a", 1)
    assert following.index == lost
    # Without its cache, the decoder begins behind the latents that are left.
    assert other.rebuilt == [lost]
    assert remote.rebuilt == []
    third = make_driver(max_lead_s=FAR, decode_apart=True)
    state = CachedDecoder(backend_of(third).decoder, CPU, CacheTable(8))
    cache: CacheTable[dict[str, Tensor]] = state.caches
    for each in chunks[:lost]:
        base = None if each.index == 0 else digest_of_latents(each.index - 1, chunks[each.index - 1].latents)
        digest = digest_of_latents(each.index, each.latents)
        state.decode(DecodeJob("a", each.index, each.latents, base, digest, ()))
    assert len(cache) == 1
    surviving = elsewhere(third)
    surviving.decoder = state
    third.engine.admit(spec, third.now)
    [again] = third.chunks("a", 1)
    assert surviving.rebuilt == []
    assert torch.equal(again.latents, following.latents)


def test_a_cache_is_found_only_behind_the_chunk_that_it_has_seen() -> None:
    table: CacheTable[str] = CacheTable(2, keep_s=10.0)
    assert table.find("a", "x") is None
    table.put("a", "x", "cache of x", 0.0)
    assert table.find("a", "x") == "cache of x"
    assert table.find("a", "y") is None
    assert table.find("b", "x") is None
    table.put("a", "y", "cache of y", 1.0)
    assert (table.find("a", "x"), table.find("a", "y"), len(table)) == (None, "cache of y", 1)


def test_a_full_table_takes_a_session_only_in_the_place_of_an_idle_one() -> None:
    table: CacheTable[str] = CacheTable(2, keep_s=10.0)
    table.put("a", "x", "a", 0.0)
    table.put("b", "x", "b", 1.0)
    assert table.admits("a", 2.0)
    assert not table.admits("c", 9.0)
    table.put("a", "y", "a", 9.0)
    assert not table.admits("c", 10.5)
    assert table.admits("c", 11.0)
    table.put("c", "x", "c", 11.0)
    assert (table.find("b", "x"), table.find("a", "y"), len(table)) == (None, "a", 2)


def test_a_decoding_without_cache_and_context_says_so(make_driver: MakeDriver) -> None:
    decoder = CachedDecoder(backend_of(make_driver()).decoder, CPU, CacheTable(1))
    job = DecodeJob("a", 3, torch.zeros(3, 16, 4, 4), "0" * 32, "1" * 32, ())
    with pytest.raises(InvalidRebuildError, match="neither a cache nor latents"):
        decoder.decode(job)


def test_equal_latents_at_another_place_of_the_video_have_another_digest() -> None:
    latents = torch.ones(3, 16, 4, 4)
    assert digest_of_latents(1, latents) == digest_of_latents(1, latents.clone())
    assert digest_of_latents(1, latents) != digest_of_latents(2, latents)
    assert digest_of_latents(1, latents) != digest_of_latents(1, latents.to(torch.bfloat16))
