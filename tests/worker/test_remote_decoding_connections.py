"""A worker and decode workers over real connections: who is admitted, and what a broken one costs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from tests.worker.decode_scene import (
    CHUNKS,
    CPU,
    HOST,
    KEY,
    LIMIT_S,
    MODEL,
    PATHS,
    Place,
    Scene,
    be_patient,
    links_for_all,
    opened_scene,
)
from turboserve.contracts.decoding import DecodeCapacity
from turboserve.tasks import stop
from turboserve.worker.engine.decode_jobs import CachedDecoder, CacheTable, DecodeJob
from turboserve.worker.model.toyworld import ToyDecoder
from turboserve.worker.remote_decoding import client, role_server, server
from turboserve.worker.remote_decoding import frames as wire
from turboserve.worker.remote_decoding.chunk_time import ChunkTime
from turboserve.worker.remote_decoding.client import DecodeClient
from turboserve.worker.remote_decoding.frames import (
    PURPOSE,
    DecodeChannel,
    DecodeChunk,
    DecodeHello,
    DecodeWelcome,
    NoCache,
    TensorSpec,
)
from turboserve.worker.remote_decoding.ports import RolePorts
from turboserve.worker.remote_decoding.routing import DecoderConnected
from turboserve.worker.remote_decoding.server import DecodeServer, DecodeTimes
from turboserve.worker.service import role_serving
from turboserve.worker.transfer import handshake
from turboserve.worker.transfer.errors import AuthenticationError, TransferError, error_of
from turboserve.worker.transfer.frames import Open, Refuse
from turboserve.worker.transfer.network import listen


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with opened_scene() as scene:
        yield scene


@pytest.mark.parametrize(
    ("path", "large_bytes"),
    [("", 1), ("", 1 << 30), ("shm", 1 << 30), *((path, 1) for path in PATHS if path)],
)
async def test_frames_come_back_bit_for_bit_and_the_cache_stays_there(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str, large_bytes: int
) -> None:
    # Payloads are authenticated on a thread, or on the event loop's. Small ones pass over the connection.
    monkeypatch.setattr(wire, "LARGE_BYTES", large_bytes)
    place = await scene.place(path=path)
    client = await scene.client(place, path=path)
    await scene.connected(client, 1)
    assert client.link_kinds == path
    for index in range(CHUNKS):
        await scene.plays(client, index)
    assert place.server is not None
    assert place.server.decoded == CHUNKS
    # Two sessions at once, of which one has its cache there.
    found = await scene.decode(client, scene.job(3, "ses_b"), scene.job(4, "ses_c"))
    for frames, index in zip(found, (3, 4), strict=True):
        assert frames is not None
        assert torch.equal(frames, scene.expected[index])


@pytest.mark.parametrize("path", PATHS)
async def test_a_replaced_decode_worker_rebuilds_the_cache(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    links_for_all(monkeypatch)
    place = await scene.place(path=path)
    client = await scene.client(place, path=path)
    await scene.connected(client, 1)
    for index in range(3):
        await scene.plays(client, index)
    await place.end()
    # The closed connection is noticed by the next question at the latest.
    assert await scene.decode(client, scene.job(3)) == [None]
    await place.start()
    async with asyncio.timeout(LIMIT_S):
        while await scene.decode(client, scene.job(3)) == [None]:
            await asyncio.sleep(0.05)
    # Latents and the context before them have come over the same path.
    assert client.link_kinds == path
    await scene.plays(client, 4)


@pytest.mark.parametrize("path", PATHS)
async def test_another_decode_worker_continues_for_one_that_died(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    links_for_all(monkeypatch)
    places = [await scene.place("dec_1", path=path), await scene.place("dec_2", path=path)]
    client = await scene.client(*places, path=path)
    await scene.connected(client, 2)
    for index in range(3):
        await scene.plays(client, index)
    [used] = [place for place in places if place.server is not None and place.server.decoded]
    await used.end()
    for index in (3, 4):
        await scene.plays(client, index)


@pytest.mark.parametrize("path", PATHS)
async def test_a_decode_worker_that_does_not_answer_costs_one_deadline(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    links_for_all(monkeypatch)
    place = await scene.place(path=path)
    client = await scene.client(place, timeout_s=2.0, path=path)
    await scene.connected(client, 1)
    assert place.server is not None
    async with place.server._turn:
        # As a frozen process: the question arrives, and no answer comes.
        assert await scene.decode(client, scene.job(0)) == [None]
    # It answers again, on a new connection.
    async with asyncio.timeout(LIMIT_S):
        while await scene.decode(client, scene.job(1)) == [None]:
            await asyncio.sleep(0.05)


async def test_a_chunk_that_nobody_waits_for_any_more_is_not_decoded(scene: Scene) -> None:
    place = await scene.place()
    home = await scene.client(place, timeout_s=1.0)
    await scene.connected(home, 1)
    assert place.server is not None
    [(serving, channel)] = place.server._serving.items()
    async with place.server._turn:
        assert await scene.decode(home, scene.job(0)) == [None]
        async with asyncio.timeout(LIMIT_S):
            while not channel.left:
                await asyncio.sleep(0.01)
    await asyncio.wait([serving])
    assert place.server.decoded == 0
    assert home.router.jobs == 0


class Answers:
    """In the place of a connection: answers after some time of the client's clock."""

    def __init__(self, now: list[float], after_s: float, *answers: Any) -> None:
        self.now, self.after_s, self.answers = now, after_s, list(answers)
        self.asked: list[tuple[bool, float]] = []

    async def ask(self, job: DecodeJob, *, with_context: bool, seconds: float) -> Any:
        self.asked.append((with_context, seconds))
        self.now[0] += self.after_s
        return self.answers.pop(0)


async def test_both_questions_of_a_decode_worker_have_one_deadline(scene: Scene) -> None:
    now = [0.0]
    ports = RolePorts(now=lambda: now[0])
    home = DecodeClient("wrk_1", MODEL, scene.config, [], KEY, 1.0, 4, ports=ports)
    answers = Answers(now, 0.25, NoCache(number=0), scene.expected[1])
    home._connections["dec_1"] = answers  # type: ignore[assignment]
    home.router.handle(DecoderConnected("dec_1"), now[0])
    found = await home._decode(scene.job(1))
    assert found is scene.expected[1]
    assert answers.asked == [(False, 1.0), (True, 0.75)]


async def test_a_chunk_whose_decoding_is_canceled_is_forgotten(scene: Scene) -> None:
    place = await scene.place()
    home = await scene.client(place)
    await scene.connected(home, 1)
    assert place.server is not None
    async with place.server._turn:
        asking = asyncio.create_task(home._decode(scene.job(0)))
        async with asyncio.timeout(LIMIT_S):
            while not home.router.jobs:
                await asyncio.sleep(0.01)
        await stop(asking)
    assert home.router.jobs == 0


async def test_what_keeps_a_decode_worker_from_being_used_is_logged_once(scene: Scene) -> None:
    place = await scene.place()
    with capture_logs() as lines:
        home = await scene.client(place, model="x" * 32)

        def reasons() -> list[str]:
            return [line["error"] for line in lines if line["event"] == "no connection to decode worker"]

        async with asyncio.timeout(LIMIT_S):
            while not reasons():
                await asyncio.sleep(0.01)
        # It is tried again and again, and refused each time.
        left = sum(line["event"] == "worker left" for line in lines)
        async with asyncio.timeout(LIMIT_S):
            while sum(line["event"] == "worker left" for line in lines) < left + 2:
                await asyncio.sleep(0.05)
        assert len(reasons()) == 1
        assert "model" in reasons()[0]
    assert home.router.workers == 0


async def limited_to(sessions: int, *homes: DecodeClient) -> None:
    """Wait until each of them has so many sessions at most."""
    async with asyncio.timeout(LIMIT_S):
        while any(home.limited(100) != sessions for home in homes):
            await asyncio.sleep(0.01)


async def test_workers_divide_what_their_decode_workers_carry(scene: Scene) -> None:
    places = [await scene.place("dec_1", sessions=8), await scene.place("dec_2", sessions=6)]
    first = await scene.client(*places)
    await first.wait_until_known(LIMIT_S)
    assert first.limited(100) == 14
    second = await scene.client(*places, name="wrk_2")
    await limited_to(7, first, second)
    # K itself may be less.
    assert first.limited(4) == 4
    # What both carry, over all workers, and what the first would have without that limit.
    assert first.capacity(9) == DecodeCapacity(
        workers=2, sessions=14, denoised=9, each={"dec_1": 8, "dec_2": 6}
    )
    # A chunk is decoded between the questions.
    await scene.plays(first, 0)
    # One that ends has no part any more.
    await stop(scene.running[second])
    await limited_to(14, first)


async def test_the_allotment_follows_the_time_of_a_chunk(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker that becomes slow carries fewer sessions, and more again when it is fast."""
    monkeypatch.setattr(client, "ASK_S", 0.01)
    monkeypatch.setattr(server, "IDLE_S", 0.01)
    place = await scene.place(sessions=6)
    home = await scene.client(place)
    await limited_to(6, home)
    assert place.server is not None
    seconds = [2.0]
    fails = [True]

    def probe() -> float:
        if fails:
            # Out of memory, for example. It ends neither the worker nor the measuring.
            fails.clear()
            raise RuntimeError("no memory")
        return seconds[0]

    measuring = asyncio.create_task(place.server.measure_idle(probe, 2))
    try:
        await limited_to(3, home)
        assert home.capacity(8) == DecodeCapacity(workers=1, sessions=3, denoised=8, each={"dec_1": 3})
        seconds[0] = 0.5
        await limited_to(12, home)
    finally:
        await stop(measuring)
    # The time of chunks that were asked for counts as well: toyworld's take far less than half a second,
    # unless the machine is very busy. It is the fastest of several, and neither the first of a video nor one
    # that rebuilds its cache is among them.
    before = place.server.sessions
    for index in range(CHUNKS):
        await scene.plays(home, index)
    assert place.server.sessions == before
    for session in ("ses_b", "ses_c", "ses_d"):
        for index in range(CHUNKS):
            await scene.plays(home, index, session)
    assert place.server.sessions != before


async def test_the_time_of_a_chunk_is_measured_by_the_clock_of_all_times(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, processor seconds: as those of the start."""
    place = await scene.place()
    home = await scene.client(place)
    await scene.connected(home, 1)
    assert place.server is not None
    ticks = itertools.count(step=3)
    monkeypatch.setattr(place.server, "_times", replace(place.server._times, clock=lambda: next(ticks)))
    observed: list[float] = []
    monkeypatch.setattr(ChunkTime, "observe", lambda _, seconds: observed.append(seconds))
    for index in range(3):
        await scene.plays(home, index)
    # Not that of a video's first chunk, which has fewer frames.
    assert observed == [3, 3]


async def test_a_chunk_waits_for_one_probe_of_an_idle_decode_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All probes together may take longer than its worker waits."""
    monkeypatch.setattr(server, "IDLE_S", 0.01)
    place = await scene.place()
    home = await scene.client(place)
    begun = threading.Semaphore(0)
    ends = threading.Semaphore(0)

    def probe() -> float:
        begun.release()
        ends.acquire()
        return 1.0

    assert place.server is not None
    measuring = asyncio.create_task(place.server.measure_idle(probe, 3))
    try:
        await asyncio.to_thread(begun.acquire)
        playing = asyncio.create_task(scene.plays(home, 0))
        async with asyncio.timeout(LIMIT_S):
            while not place.server._turn._waiters:
                await asyncio.sleep(0.01)
            ends.release()
            await playing
    finally:
        measuring.cancel()
        ends.release(100)
        await stop(measuring)


async def test_a_decode_worker_that_returns_with_less_time_allots_less(scene: Scene) -> None:
    place = await scene.place(sessions=6)
    home = await scene.client(place)
    await limited_to(6, home)
    await place.end()
    await scene.connected(home, 0)
    # It counts for a while: most are back at once.
    assert home.limited(100) == 6
    place.sessions = 3
    await place.start()
    await limited_to(3, home)


class Hangs:
    """A decoder that returns only when it is released."""

    def __init__(self, decoder: ToyDecoder) -> None:
        self._decoder = decoder
        self.released = threading.Event()

    def decode(self, latents: Tensor, caches: Any) -> Any:
        self.released.wait()
        return self._decoder.decode(latents, caches)


async def test_a_decode_that_hangs_ends_the_decode_worker(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_server, "HANGS_S", 0.1)
    monkeypatch.setattr(role_server, "END_S", 0.1)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    hangs = Hangs(scene.decoder)
    cached = CachedDecoder(hangs, CPU, CacheTable(8))  # type: ignore[arg-type]
    served = DecodeServer(
        "dec_1", MODEL, scene.config, cached, KEY, time.monotonic, DecodeTimes(ChunkTime(1.0), lambda _: 8)
    )
    listener, port = await listen(served.serve, HOST, 0)
    home = DecodeClient("wrk_1", MODEL, scene.config, [f"tcp://{HOST}:{port}"], KEY, LIMIT_S, 4)
    running = asyncio.create_task(home.run())
    try:
        await scene.connected(home, 1)
        asking = asyncio.create_task(scene.decode(home, scene.job(0)))
        async with asyncio.timeout(LIMIT_S):
            await role_serving.run_until_it_hangs(served)
        assert statuses == [role_serving.HUNG_STATUS]
        assert await asking == [None]
    finally:
        hangs.released.set()
        listener.close()
        await stop(running)


async def test_a_full_decode_worker_refuses_a_session_and_keeps_the_others(scene: Scene) -> None:
    place = await scene.place(room=1)
    client = await scene.client(place)
    await scene.connected(client, 1)
    await scene.plays(client, 0, "ses_a")
    assert await scene.decode(client, scene.job(0, "ses_b")) == [None]
    await scene.plays(client, 1, "ses_a")


@asynccontextmanager
async def channel_to(place: Place) -> AsyncIterator[DecodeChannel]:
    reader, writer = await asyncio.open_connection(HOST, place.port)
    channel = DecodeChannel(reader, writer)
    try:
        yield channel
    finally:
        channel.abort()


OTHER_KEY = b"o" * 32


async def admitted(channel: DecodeChannel, key: bytes = KEY, purpose: str = PURPOSE) -> None:
    opened = Open(session=purpose, migration=0, worker="wrk_2", nonce=handshake.new_nonce())
    await handshake.authenticate(channel, opened, key, LIMIT_S)


@pytest.mark.parametrize(("key", "purpose"), [(OTHER_KEY, PURPOSE), (KEY, "ses_a")])
async def test_who_does_not_prove_the_key_is_not_admitted(scene: Scene, key: bytes, purpose: str) -> None:
    place = await scene.place()
    async with channel_to(place) as channel:
        with pytest.raises(AuthenticationError):
            await admitted(channel, key, purpose)


async def test_a_decode_worker_with_another_key_is_not_used(scene: Scene) -> None:
    place = await scene.place()
    other = await scene.place("dec_2")
    assert other.server is not None
    other.server._key = OTHER_KEY
    client = await scene.client(place, other)
    await scene.connected(client, 1)
    for index in range(2):
        await scene.plays(client, index)
    assert other.server.decoded == 0


async def refused(channel: DecodeChannel) -> TransferError:
    frame = await channel.next(LIMIT_S)
    assert isinstance(frame, Refuse)
    return error_of(frame.code, frame.detail)


async def test_a_worker_of_another_model_is_refused(scene: Scene) -> None:
    place = await scene.place()
    async with channel_to(place) as channel:
        await admitted(channel)
        await channel.post(DecodeHello(model="x" * 32, capacity=4), (), LIMIT_S)
        assert (await refused(channel)).code == "wrong_layout"


Change = Callable[[DecodeChunk, Tensor], tuple[DecodeChunk, tuple[Tensor, ...]]]


def _shape(chunk: DecodeChunk, latents: Tensor) -> tuple[DecodeChunk, tuple[Tensor, ...]]:
    spec = TensorSpec(dtype="float32", shape=(1 << 20, 1 << 20, 1 << 20, 1))
    return chunk.model_copy(update={"latents": spec}), ()


def _dtype(chunk: DecodeChunk, latents: Tensor) -> tuple[DecodeChunk, tuple[Tensor, ...]]:
    spec = TensorSpec(dtype="object", shape=tuple(latents.shape))
    return chunk.model_copy(update={"latents": spec}), ()


def _context(chunk: DecodeChunk, latents: Tensor) -> tuple[DecodeChunk, tuple[Tensor, ...]]:
    spec = TensorSpec(dtype="float32", shape=(1_000, *latents.shape))
    return chunk.model_copy(update={"context": spec}), (latents,)


@pytest.mark.parametrize("change", [_shape, _dtype, _context])
async def test_sizes_that_are_not_the_model_s_are_refused_before_any_memory_is_taken(
    scene: Scene, change: Change
) -> None:
    place = await scene.place()
    job = scene.job(0)
    async with channel_to(place) as channel:
        await admitted(channel)
        await channel.post(DecodeHello(model=MODEL, capacity=4), (), LIMIT_S)
        assert isinstance(await channel.next(LIMIT_S), DecodeWelcome)
        question = DecodeChunk(
            number=0,
            session=job.session,
            index=0,
            base=None,
            digest=job.digest,
            latents=TensorSpec.of(job.latents),
        )
        await channel.post(*change(question, job.latents), LIMIT_S)
        assert (await refused(channel)).code == "protocol_broken"


async def test_a_payload_that_was_changed_on_the_way_ends_the_connection(scene: Scene) -> None:
    place = await scene.place()
    job = scene.job(0)
    async with channel_to(place) as channel:
        await admitted(channel)
        await channel.post(DecodeHello(model=MODEL, capacity=4), (), LIMIT_S)
        assert isinstance(await channel.next(LIMIT_S), DecodeWelcome)
        question = DecodeChunk(
            number=0,
            session=job.session,
            index=0,
            base=None,
            digest=job.digest,
            latents=TensorSpec.of(job.latents),
        )
        seal = channel._seal

        async def changed(data: bytes) -> bytes:
            found = bytearray(await seal(data))
            found[0] ^= 1
            return bytes(found)

        channel._seal = changed  # type: ignore[method-assign]
        await channel.post(question, (job.latents,), LIMIT_S)
        assert (await refused(channel)).code == "not_authenticated"
    assert place.server is not None
    assert place.server.decoded == 0
