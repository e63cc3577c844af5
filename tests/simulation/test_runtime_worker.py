"""The worker's service code on the virtual loop, with a virtual device, an in-memory broker and network."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.trace import StatusCode

from tests.helpers.recorded_spans import record_spans
from tests.simulation.worker_world import PROFILE, WorkerWorld
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.sessions import Phase
from turboserve.contracts.workers import WorkerPhase
from turboserve.ids import SystemRandomness, use_source
from turboserve.simulation.runtime.device.contents import begin
from turboserve.simulation.runtime.device.platform import VirtualPlatform
from turboserve.worker.model.weight_manifest import WeightManifest
from turboserve.worker.replicas.weight_filler import WeightFiller
from turboserve.worker.service import app
from turboserve.worker.service.events import PublishOutcome
from turboserve.worker.service.packager import PackagedChunk
from turboserve.worker.service.ports import Loaded, Platform, StoredWeights


@pytest.fixture(autouse=True)
def randomness() -> Iterator[None]:
    """Restore the system's randomness: a world's ids come from its seed, those of later tests do not."""
    yield
    use_source(SystemRandomness())


@pytest.fixture
def world() -> Iterator[WorkerWorld]:
    world = WorkerWorld()
    world.call(world.serve())
    yield world
    world.close()


def joined(world: WorkerWorld, *workers: str) -> None:
    for worker in workers:
        world.start(worker)
    world.until(
        lambda: all(name in world.loads and world.loads[name].phase is WorkerPhase.READY for name in workers),
        "they join",
    )


def follows(world: WorkerWorld, session: str) -> None:
    """Check that every chunk is made from the state of the chunk before."""
    chunks = world.chunks(session)
    assert chunks[0][1].parent == begin(world.rows[session].seed)
    for (_, before), (header, after) in pairwise(chunks):
        assert after.parent == before.number, header


def play(world: WorkerWorld, session: str, chunks: int) -> None:
    """Watch until the log has `chunks` chunks."""
    deadline = world.loop.time() + 120.0
    while len(made := world.chunks(session)) < chunks:
        assert world.loop.time() < deadline, f"{len(made)} of {chunks} chunks"
        world.call(world.watch(session, made[-1][0].start_s if made else 0.0))
        world.run(0.5)


def test_a_platform_is_what_the_worker_asks_for(world: WorkerWorld) -> None:
    platform: Platform = world.start("wrk_a").platform
    assert isinstance(platform, VirtualPlatform)


def test_a_session_s_chunks_are_in_the_log_as_they_were_made(world: WorkerWorld) -> None:
    joined(world, "wrk_a")
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 12)
    follows(world, "ses_1")
    header, _ = world.chunks("ses_1")[5]
    assert (header.worker, header.epoch, header.frames) == ("wrk_a", 1, 12)
    assert world.loads["wrk_a"].capacity == 2


def test_a_worker_that_starts_is_known_meanwhile(world: WorkerWorld) -> None:
    world.start("wrk_a")
    world.run(0.5)
    phases = [world.loads["wrk_a"].phase]
    world.run(2.0)
    phases.append(world.loads["wrk_a"].phase)
    assert phases == [WorkerPhase.STARTING, WorkerPhase.READY]


def test_another_worker_goes_on_from_the_latents_of_one_that_was_killed(world: WorkerWorld) -> None:
    joined(world, "wrk_a", "wrk_b")
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 8)
    world.loop.kill(world.incarnations["wrk_a"].process)
    made = len(world.chunks("ses_1"))
    world.call(world.place("ses_1", "wrk_b"))
    play(world, "ses_1", made + 4)
    follows(world, "ses_1")
    assert {header.worker for header, _ in world.chunks("ses_1")[made:]} == {"wrk_b"}


def test_lost_latents_show_in_the_chunk_that_follows(world: WorkerWorld) -> None:
    joined(world, "wrk_a", "wrk_b")
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 8)
    world.loop.kill(world.incarnations["wrk_a"].process)
    world.latents.clear()
    made = len(world.chunks("ses_1"))
    world.call(world.place("ses_1", "wrk_b"))
    play(world, "ses_1", made + 2)
    chunks = world.chunks("ses_1")
    assert chunks[made][1].parent != chunks[made - 1][1].number
    assert chunks[made + 1][1].parent == chunks[made][1].number


def test_a_frozen_worker_is_fenced_and_makes_nothing_more_than_its_lease_allows(world: WorkerWorld) -> None:
    joined(world, "wrk_a", "wrk_b")
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 6)
    world.loop.freeze(world.incarnations["wrk_a"].process, 15.0)
    world.call(world.place("ses_1", "wrk_b"))
    play(world, "ses_1", 20)
    world.run(15.0)
    epochs = [header.epoch for header, _ in world.chunks("ses_1")]
    assert epochs == sorted(epochs)
    assert set(epochs) == {1, 2}


def test_a_migration_carries_the_state_to_its_target(world: WorkerWorld) -> None:
    joined(world, "wrk_a", "wrk_b")
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 6)
    world.call(world.migrate("ses_1", "wrk_b"))
    world.until(lambda: world.rows["ses_1"].worker == "wrk_b", "it migrates")
    play(world, "ses_1", 16)
    follows(world, "ses_1")
    workers = [header.worker for header, _ in world.chunks("ses_1")]
    assert set(workers) == {"wrk_a", "wrk_b"}
    assert world.fabric.wires == {}
    world.run(3.0)
    source = world.incarnations["wrk_a"].worker
    assert source is not None
    assert source.engine.free_slabs == PROFILE.slabs


@pytest.mark.parametrize("suspended", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_migration_that_breaks_anywhere_loses_and_repeats_nothing(seed: int, suspended: bool) -> None:
    world = WorkerWorld(seed)
    world.call(world.serve())
    joined(world, "wrk_a", "wrk_b")
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 5)
    if suspended:
        world.change("ses_1", phase=Phase.SUSPENDED)
        world.call(world.handle("ses_1", "wrk_a"))
        world.run(3.0)
    faults = world.fabric.faults
    faults.breaks, faults.corrupts, faults.stalls = 0.1, 0.2, 0.1
    here, there = "wrk_a", "wrk_b"
    for _ in range(4):
        world.call(world.migrate("ses_1", there))
        world.run(30.0)
        if world.rows["ses_1"].worker == there:
            here, there = there, here
        else:
            phase = Phase.SUSPENDED if suspended else Phase.ACTIVE
            world.change("ses_1", phase=phase, target=None, migration=None)
            world.call(world.handle("ses_1", here))
            world.call(world.handle("ses_1", there))
    faults.breaks = faults.corrupts = faults.stalls = 0.0
    world.run(10.0)
    if suspended:
        world.call(world.place("ses_1", here))
    play(world, "ses_1", len(world.chunks("ses_1")) + 5)
    follows(world, "ses_1")
    idle = world.incarnations[there].worker
    assert idle is not None
    assert (idle.engine.free_slabs, idle.engine.host_bytes_used) == (PROFILE.slabs, 0)
    assert world.fabric.wires == {}
    world.close()


def test_a_lost_device_ends_the_process(world: WorkerWorld) -> None:
    joined(world, "wrk_a")
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 3)
    life = world.incarnations["wrk_a"]
    life.faults.lost = True
    world.until(lambda: life.status is not None, "it ends")
    assert life.status == 1


def test_a_session_for_which_computing_fails_ends_alone(world: WorkerWorld) -> None:
    joined(world, "wrk_a")
    world.call(world.place("ses_1", "wrk_a"))
    world.call(world.place("ses_2", "wrk_a", seed=3))
    play(world, "ses_2", 3)
    world.incarnations["wrk_a"].faults.failing.add("ses_1")
    world.call(world.watch("ses_1", 2.0))
    world.until(lambda: "ses_1" in world.failed, "it fails")
    play(world, "ses_2", 12)
    follows(world, "ses_2")
    assert "fails for ses_1" in world.failed["ses_1"]


def test_a_slow_device_takes_as_many_times_as_long_and_says_when_it_begins(world: WorkerWorld) -> None:
    joined(world, "wrk_a")
    faults = world.incarnations["wrk_a"].faults
    begun: list[str] = []
    faults.on_forward = begun.append
    faults.slowdown = 4.0
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 2)
    slow, usual = world.chunks("ses_1")[1][0].compute_s, sum(PROFILE.chunk_s().values())
    assert slow > 3 * usual
    assert begun.count("ses_1") >= 2 * (PROFILE.denoising + 1)
    faults.slowdown = 1.0
    play(world, "ses_1", 12)
    assert world.chunks("ses_1")[-1][0].compute_s < slow / 2
    follows(world, "ses_1")


def test_an_engine_that_stands_still_ends_the_process(world: WorkerWorld) -> None:
    joined(world, "wrk_a")
    life = world.incarnations["wrk_a"]
    life.faults.stalled_until = math.inf
    world.run(100.0)
    assert life.status is None
    world.until(lambda: life.status is not None, "it is found stuck")
    assert life.status == 1


def test_a_worker_that_is_stopped_sends_its_final_report(world: WorkerWorld) -> None:
    joined(world, "wrk_a")
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 4)
    life = world.incarnations["wrk_a"]
    assert life.runtime is not None
    life.runtime.stopping.set()
    world.until(lambda: life.status is not None, "it ends")
    assert life.status == 0
    assert "wrk_a" in world.gone
    follows(world, "ses_1")


@pytest.mark.parametrize("chunk_at_once", [False, True])
def test_the_same_seed_gives_the_same_log(chunk_at_once: bool) -> None:
    def played(seed: int) -> list[object]:
        world = WorkerWorld(seed, replace(PROFILE, chunk_at_once=chunk_at_once))
        world.call(world.serve())
        joined(world, "wrk_a", "wrk_b")
        world.call(world.place("ses_1", "wrk_a"))
        world.call(world.place("ses_2", "wrk_a"))
        world.fabric.faults.breaks = 0.1
        world.call(world.migrate("ses_1", "wrk_b"))
        play(world, "ses_2", 20)
        chunks = [*world.chunks("ses_1"), *world.chunks("ses_2")]
        callbacks = world.loop.callbacks
        world.close()
        return [callbacks, *chunks]

    assert played(4) == played(4)


def test_a_publication_that_outlives_its_run_still_sets_the_error_of_its_chunks_span(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = record_spans(monkeypatch)
    joined(world, "wrk_a")
    worker = world.incarnations["wrk_a"].worker
    assert worker is not None
    refused, published = asyncio.Event(), worker.logs._wire.publish

    async def publish(chunk: PackagedChunk, *rest: Any, **options: Any) -> Any:
        if chunk.index < 1:
            return await published(chunk, *rest, **options)
        await refused.wait()
        return PublishOutcome.FENCED, 0, False

    monkeypatch.setattr(worker.logs._wire, "publish", publish)
    world.call(world.place("ses_1", "wrk_a"))
    world.until(lambda: ("ses_1", 1) in {key[::2] for key in worker.logs.publishing}, "chunk 1 is sent")
    world.change("ses_1", worker="wrk_b")
    world.call(world.handle("ses_1", "wrk_a"))
    world.until(lambda: "ses_1" not in worker.table.entries and not worker.logs.chunks, "the run is evicted")

    def chunk_spans() -> dict[object, StatusCode]:
        made = [span for span in exporter.get_finished_spans() if span.name == "generate chunk"]
        return {(span.attributes or {})["turboserve.chunk.index"]: span.status.status_code for span in made}

    assert 1 not in chunk_spans(), "its publication is in progress"
    refused.set()
    world.until(lambda: not worker.logs.publishing, "the publication ends")
    assert chunk_spans()[1] is StatusCode.ERROR
    assert chunk_spans()[0] is not StatusCode.ERROR


def test_a_publication_that_is_cancelled_after_its_run_ends_its_chunks_span(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = record_spans(monkeypatch)
    joined(world, "wrk_a")
    worker = world.incarnations["wrk_a"].worker
    assert worker is not None

    async def publish(chunk: PackagedChunk, *rest: Any, **options: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(worker.logs._wire, "publish", publish)
    world.call(world.place("ses_1", "wrk_a"))
    world.until(lambda: worker.logs.publishing, "chunk 0 is sent")
    world.change("ses_1", worker="wrk_b")
    world.call(world.handle("ses_1", "wrk_a"))
    world.until(lambda: "ses_1" not in worker.table.entries and not worker.logs.chunks, "the run is evicted")

    def ended() -> bool:
        return "generate chunk" in [span.name for span in exporter.get_finished_spans()]

    before = ended()
    worker.logs.close()
    world.until(lambda: not worker.logs.publishing, "the publication is cancelled")
    assert (before, ended()) == (False, True)


@pytest.mark.parametrize("away_s", [2.0, 45.0])
def test_a_loss_is_in_the_next_header_also_after_the_broker_was_away_for_long(
    world: WorkerWorld, away_s: float
) -> None:
    """After 30 s the log's end is asked for. The question and a chunk reach the broker together."""
    joined(world, "wrk_a")
    world.call(world.place("ses_1", "wrk_a"))
    play(world, "ses_1", 12)
    written = world.loop.time()
    made = len(world.chunks("ses_1"))
    play(world, "ses_1", made + 2)
    last = world.chunks("ses_1")[-1][0]
    # Its playback continues, so that a chunk is in flight while the broker is away.
    world.call(world.watch("ses_1", last.start_s))
    worker = world.incarnations["wrk_a"].worker
    assert worker is not None
    world.until(lambda: worker.table.entries["ses_1"].next_publish > last.index + 1, "a chunk is accepted")
    world.call(world.watch("ses_1", last.start_s + 3.0))
    world.broker.stop()
    world.run(away_s)
    accepted = worker.table.entries["ses_1"].next_publish
    world.broker.start(written_until=written)

    def headers() -> list[ChunkHeader]:
        return [ChunkHeader.from_headers(e.headers) for e in world.call(world.entries("ses_1"))]

    world.until(lambda: headers()[-1].index >= accepted + 1, "the next chunk comes")
    found = headers()
    indexes = [header.index for header in found]
    lost = accepted - 1
    assert lost not in indexes
    assert found[-1].contiguous_from == accepted


def test_a_worker_hears_of_those_that_want_its_weights_before_it_is_ready(
    world: WorkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the state store sent a key to a ready worker that had not subscribed yet."""
    known, load = list[bool](), VirtualPlatform.load

    async def with_weights(self: VirtualPlatform, filler: WeightFiller | None = None) -> Loaded:
        return replace(await load(self, filler), weights=StoredWeights(WeightManifest(()), {}))

    async def subscribes(*_: object) -> None:
        await asyncio.sleep(5.0)
        known.append("wrk_a" in world.loads and world.loads["wrk_a"].phase is WorkerPhase.READY)

    monkeypatch.setattr(VirtualPlatform, "load", with_weights)
    monkeypatch.setattr(app, "send_weights", subscribes)
    joined(world, "wrk_a")
    world.until(lambda: known, "it subscribes")
    assert known == [False]
