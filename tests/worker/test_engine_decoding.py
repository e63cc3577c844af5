"""Decoding several sessions at once: only equal rows, by the profile, with the same frames as alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import ChunkReady, Decoder, Rebuild, SessionFailed, SessionSpec
from turboserve.worker.engine.session import DecoderContext
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.taehv import Taehv, TaehvConfig, TaehvDecoder
from turboserve.worker.model.toyworld import ToyDecoder, read_toyworld
from turboserve.worker.model.wan_vae import WanDecoder, WanVae
from turboserve.worker.model.wan_vae_config import WanVaeConfig

MakeDriver = Callable[..., Any]
ROWS, SIDE = 3, (4, 6)


def wan(dtype: torch.dtype) -> Decoder:
    vae = WanVae(WanVaeConfig(base_dim=4)).requires_grad_(False)
    for name, parameter in vae.named_parameters():
        # With weights at their initial scale, the frames would be almost all alike.
        nn.init.normal_(parameter, 1.0 if name.endswith("gamma") else 0.0, 0.15)
    return WanDecoder(vae.to(dtype), *SIDE)


def taehv(dtype: torch.dtype) -> Decoder:
    model = Taehv(TaehvConfig(widths=(16, 12, 8, 8))).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(1.6)
    nn.init.constant_(model.get_parameter(f"decoder.{len(model.decoder) - 1}.bias"), 0.5)
    return TaehvDecoder(model.to(dtype), *SIDE, frames_at_once=2)


def toyworld(dtype: torch.dtype) -> Decoder:
    world = read_toyworld()
    return ToyDecoder(world.vae.to(dtype), world.config)


@pytest.mark.parametrize("make", [wan, taehv, toyworld])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float64, 1e-9)])
def test_a_batch_gives_each_session_what_it_gets_alone(
    make: Callable[[torch.dtype], Decoder], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(4)
    decoder = make(dtype)
    side = (8, 8) if make is toyworld else SIDE
    together: list[dict[str, Tensor]] | None = None
    alone: list[list[dict[str, Tensor]] | None] = [None] * ROWS
    for chunk in range(3):
        latents = torch.randn(ROWS, 3, 16, *side)
        before = [{name: t.clone() for name, t in cache.items()} for cache in together or ()]
        frames, after = decoder.decode(latents, together)
        for cache, kept in zip(together or (), before, strict=True):
            assert all(torch.equal(cache[name], kept[name]) for name in kept)
        together = after
        assert frames.shape[:2] == (ROWS, 12 if chunk else 9)
        assert frames.float().std() > 1
        for row in range(ROWS):
            [expected], alone[row] = decoder.decode(latents[row : row + 1], alone[row])
            # Not bit-equal: a convolution over more rows may be blocked differently. The difference is
            # rounding: a level of a pixel at most, and next to nothing in float64.
            assert (frames[row].int() - expected.int()).abs().max() <= 1
            caches = alone[row]
            assert caches is not None
            [own] = caches
            assert own.keys() == together[row].keys()
            for name, part in own.items():
                assert together[row][name].shape == part.shape
                assert (together[row][name] - part).abs().max() <= tolerance * (1 + part.abs().max())
    # A session's cache migrates, is freed and outlives its neighbors independently.
    parts = [part for cache in together or () for part in cache.values()]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == len(parts)
    assert decoder.cache_bytes == sum(t.untyped_storage().nbytes() for t in (together or [{}])[0].values())


class Counted:
    """Records the latents of every batch that a stage computes."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[tuple[str, int, bool]]] = []
        """Per row: session, latent frames, whether it has a cache."""
        compute = engine.decode.compute

        def counted(batch: list[Any]) -> Any:
            self.batches.append(
                [(each.session.name, len(each.item.latents), each.cache is not None) for each in batch]
            )
            return compute(batch)

        monkeypatch.setattr(engine.decode, "compute", counted)

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


def queued(driver: Any, names: str, chunks: int = 1) -> None:
    """Give each session the undecoded latents of its next chunk."""
    for name in names:
        driver.engine.admit(SessionSpec(name, "a red circle", seed=ord(name)), driver.now)
    driver.run()
    for name in names:
        session = driver.engine.sessions[name]
        chunk = driver.engine.config.latent_shape
        session.undecoded.append(DecoderContext(torch.full(chunk, float(ord(name)))))


PAYS = LatencyProfile({1: 0.10, 2: 0.11, 3: 0.12, 4: 0.13})
DOES_NOT = LatencyProfile({1: 0.10, 2: 0.20, 3: 0.30, 4: 0.40})


@pytest.mark.parametrize(
    ("profile", "decode_batch", "policy", "sizes"),
    [
        (PAYS, 4, "step", [4, 1]),
        (PAYS, 3, "step", [3, 2]),
        (DOES_NOT, 4, "step", [1] * 5),
        (PAYS, 1, "step", [1] * 5),
        (PAYS, 4, "fcfs", [1] * 5),
        (DOES_NOT, 4, "chunk", [4, 1]),
    ],
)
def test_how_many_are_decoded_at_once_is_the_policy_s_by_the_profile(
    make_driver: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    profile: LatencyProfile,
    decode_batch: int,
    policy: str,
    sizes: list[int],
) -> None:
    driver = make_driver(slabs=5, max_lead_s=0.5, decode_batch=decode_batch, policy=policy)
    queued(driver, "abcde")
    counted = Counted(driver.engine, monkeypatch)
    driver.engine.decode.profile = LatencyProfile(profile.to_mapping())
    driver.run()
    assert counted.sizes == sizes


def test_only_rows_that_are_alike_are_stacked(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, tiny_config: ModelConfig
) -> None:
    driver = make_driver(slabs=6, max_lead_s=0.5, decode_batch=6)
    queued(driver, "ab")
    two_chunks = torch.randn(6, *tiny_config.latent_shape[1:])
    for name, latents in (("c", two_chunks[:3]), ("d", two_chunks), ("e", two_chunks)):
        spec = SessionSpec(name, "a red circle", rebuild=Rebuild(2, latents))
        driver.engine.admit(spec, driver.now)
    counted = Counted(driver.engine, monkeypatch)
    driver.engine.decode.profile = LatencyProfile(PAYS.to_mapping())
    driver.run(limit=5000)
    first = counted.batches[:3]
    assert sorted(tuple(sorted(batch)) for batch in first) == [
        (("a", 3, True), ("b", 3, True)),
        (("c", 3, False),),
        (("d", 6, False), ("e", 6, False)),
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_session_s_video_does_not_depend_on_whom_it_was_decoded_with(
    make_driver: MakeDriver, overlap: bool
) -> None:
    def video(names: str, **options: Any) -> dict[str, list[ChunkReady]]:
        driver = make_driver(max_lead_s=3.0, overlap=overlap, policy="chunk", **options)
        for name in names:
            driver.engine.admit(SessionSpec(name, f"a red {name}", seed=ord(name)), driver.now)
        chunks = [event for event in driver.run() if isinstance(event, ChunkReady)]
        return {name: [chunk for chunk in chunks if chunk.session == name] for name in names}

    crowd = video("abc", decode_batch=3)
    for name in "abc":
        [alone] = video(name).values()
        assert [chunk.index for chunk in crowd[name]] == [chunk.index for chunk in alone] == [0, 1, 2, 3, 4]
        for ours, theirs in zip(crowd[name], alone, strict=True):
            assert (ours.frames.int() - theirs.frames.int()).abs().max() <= 1


def test_a_session_that_fails_in_a_batch_fails_alone(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(max_lead_s=0.5, decode_batch=4)
    queued(driver, "abc")
    engine = driver.engine
    works, counted = engine.backend.decoder.decode, Counted(engine, monkeypatch)

    def decode(latents: Tensor, caches: Any) -> Any:
        if (latents == ord("b")).any():
            raise RuntimeError("cannot see this")
        return works(latents, caches)

    monkeypatch.setattr(engine.backend.decoder, "decode", decode)
    engine.decode.profile = LatencyProfile(PAYS.to_mapping())
    events = driver.run()
    assert [event.session for event in events if isinstance(event, SessionFailed)] == ["b"]
    assert "cannot see this" in events[0].error
    assert sorted(counted.sizes) == [1, 1, 1, 3]
    assert {name: len(s.undecoded) for name, s in engine.sessions.items()} == {"a": 0, "c": 0}
    assert engine.decode.profile.to_mapping() == PAYS.to_mapping()


def test_only_usual_chunks_refine_the_profile(
    make_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(max_lead_s=3.0)
    seen: list[int] = []
    monkeypatch.setattr(driver.engine.decode.profile, "observe", lambda size, _: seen.append(size))
    driver.engine.admit(SessionSpec("a", "a red circle"), driver.now)
    lost = torch.randn(3, *driver.engine.config.latent_shape[1:])
    driver.engine.admit(SessionSpec("b", "a red circle", rebuild=Rebuild(1, lost)), driver.now)
    made = [event.index for event in driver.run() if isinstance(event, ChunkReady)]
    # Neither a video's first chunk nor decodes that only warmed a decoder.
    assert len(seen) == len(made) - 1


@pytest.mark.parametrize(("options", "differs_by", "most"), [({}, 0, 1), ({"decode_batch": 3}, 1, 3)])
def test_by_default_frames_are_bit_equal_whatever_waits_beside(
    make_driver: MakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, int],
    differs_by: int,
    most: int,
) -> None:
    driver = make_driver(max_lead_s=2.0, policy="chunk", **options)
    decoder = ToyDecoder(read_toyworld().vae, driver.engine.config)
    monkeypatch.setattr(driver.engine.backend.here, "decoder", decoder)
    counted = Counted(driver.engine, monkeypatch)
    for name in "abc":
        driver.engine.admit(SessionSpec(name, f"a red {name}", seed=ord(name)), driver.now)
    chunks = [event for event in driver.run() if isinstance(event, ChunkReady)]
    assert max(counted.sizes) == most
    caches: dict[str, list[dict[str, Tensor]]] = {}
    for chunk in chunks:
        [alone], caches[chunk.session] = decoder.decode(chunk.latents[None], caches.get(chunk.session))
        assert (chunk.frames.int() - alone.int()).abs().max() <= differs_by
    assert len(chunks) == 9
