"""A worker and decode workers in one process, over real connections and links."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.ports import free_ports
from turboserve.tasks import stop
from turboserve.worker.engine.decode_jobs import CachedDecoder, CacheTable, DecodeJob, digest_of_latents
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.toyworld import ToyDecoder, read_toyworld
from turboserve.worker.remote_decoding import client, frames, linking, role_server, server
from turboserve.worker.remote_decoding.chunk_time import ChunkTime
from turboserve.worker.remote_decoding.client import DecodeClient
from turboserve.worker.remote_decoding.server import DecodeServer, DecodeTimes
from turboserve.worker.transfer import links as transfer_links
from turboserve.worker.transfer import pair, shm
from turboserve.worker.transfer.links import Links
from turboserve.worker.transfer.network import listen

CPU = torch.device("cpu")
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
MODEL = "m" * 32
HOST = "127.0.0.1"
LIMIT_S = 60.0
CHUNKS = 5
PATHS = ("", "shm", "gloo")
"""Backends over which payloads pass. Empty: over the connection."""


def links_of(path: str) -> Links | None:
    """The links of one worker."""
    return Links((path,), CPU, MODEL) if path else None


def _carried(sessions: int, seconds: float) -> int:
    return int(sessions / seconds)


class Place:
    """A decode worker's address. The worker may be replaced."""

    def __init__(
        self,
        decoder: ToyDecoder,
        config: ModelConfig,
        name: str,
        room: int = 8,
        sessions: int = 8,
        path: str = "",
        batches: dict[int, float] | None = None,
    ) -> None:
        """`batches`: time of some chunks at once, by number."""
        self.decoder, self.config, self.name, self.room = decoder, config, name, room
        self.sessions, self.path, self.batches = sessions, path, batches or {1: 1.0}
        self.server: DecodeServer | None = None
        # No outgoing connection takes it while the worker is replaced.
        [self.port] = free_ports(1)
        self._listener: asyncio.Server | None = None
        self._run: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"tcp://{HOST}:{self.port}"

    async def start(self) -> None:
        cached = CachedDecoder(self.decoder, CPU, CacheTable(self.room, 1e9))
        now = time.monotonic
        # A chunk takes a second. If it takes x seconds, the worker carries 1 / x as many sessions.
        carries = partial(_carried, self.sessions)
        profile, rows = LatencyProfile(self.batches), max(self.batches)
        times = DecodeTimes(ChunkTime(1.0), carries, profile, rows)
        links = links_of(self.path)
        self.server = DecodeServer(self.name, MODEL, self.config, cached, KEY, now, times, links=links)
        self._run = asyncio.create_task(self.server.run())
        self._listener, self.port = await listen(self.server.serve, HOST, self.port)

    async def end(self) -> None:
        """End as a killed process does: all connections close."""
        if self._listener is not None and self._run is not None:
            self._listener.close()
            await stop(self._run)
            self._listener = self._run = None


def job_of(latents: Sequence[Tensor], index: int, session: str = "ses_a") -> DecodeJob:
    """A chunk of a video with these latents."""
    digests = [digest_of_latents(number, each) for number, each in enumerate(latents)]
    base = digests[index - 1] if index else None
    context = tuple(latents[max(0, index - 3) : index])
    return DecodeJob(session, index, latents[index], base, digests[index], context)


@cache
def toyworld() -> tuple[ToyDecoder, ModelConfig, list[Tensor], list[Tensor]]:
    """toyworld's decoder, latents of a video, and its frames chunk by chunk."""
    world = read_toyworld()
    decoder, generator = ToyDecoder(world.vae, world.config), torch.Generator().manual_seed(3)
    latents = [torch.randn(world.config.latent_shape, generator=generator) for _ in range(CHUNKS)]
    reference = CachedDecoder(decoder, CPU, CacheTable(1))
    return decoder, world.config, latents, [reference.decode(job_of(latents, n)) for n in range(CHUNKS)]


class Scene:
    def __init__(self) -> None:
        self.decoder, self.config, self.latents, self.expected = toyworld()
        self.open = AsyncExitStack()
        self.running: dict[DecodeClient, asyncio.Task[None]] = {}

    def job(self, index: int, session: str = "ses_a") -> DecodeJob:
        return job_of(self.latents, index, session)

    async def place(self, name: str = "dec_1", **options: Any) -> Place:
        place = Place(self.decoder, self.config, name, **options)
        await place.start()
        self.open.push_async_callback(place.end)
        return place

    async def client(
        self,
        *places: Place,
        key: bytes = KEY,
        model: str = MODEL,
        timeout_s: float = LIMIT_S,
        name: str = "wrk_1",
        capacity: int = 4,
        path: str = "",
    ) -> DecodeClient:
        addresses, links = [place.address for place in places], links_of(path)
        client = DecodeClient(
            name, model, self.config, addresses, key, timeout_s, capacity, own=1, links=links
        )
        running = asyncio.create_task(client.run())
        self.open.push_async_callback(stop, running)
        self.running[client] = running
        return client

    async def connected(self, client: DecodeClient, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while client.router.workers != count:
                await asyncio.sleep(0.01)

    async def decode(self, client: DecodeClient, *jobs: DecodeJob) -> list[Tensor | None]:
        return await asyncio.to_thread(client.decode, jobs)

    async def plays(self, client: DecodeClient, index: int, session: str = "ses_a") -> None:
        [frames] = await self.decode(client, self.job(index, session))
        assert frames is not None
        assert torch.equal(frames, self.expected[index])


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a busy machine may take seconds: no test waits for the end of these limits."""
    monkeypatch.setattr(role_server, "ADMIT_S", LIMIT_S)
    monkeypatch.setattr(server, "ANSWER_S", LIMIT_S)
    monkeypatch.setattr(client, "CONNECT_S", LIMIT_S)
    monkeypatch.setattr(client, "ASK_S", 0.05)
    monkeypatch.setattr(linking, "LINK_S", LIMIT_S)
    monkeypatch.setattr(transfer_links, "CONNECT_S", LIMIT_S)
    monkeypatch.setattr(pair, "PROGRESS_S", LIMIT_S)
    monkeypatch.setattr(shm, "STOPPED_S", LIMIT_S)


def links_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """toyworld's payloads are too small for links."""
    monkeypatch.setattr(frames, "LARGE_BYTES", 1)


@asynccontextmanager
async def opened_scene() -> AsyncIterator[Scene]:
    """A scene with toyworld's decoder."""
    scene = Scene()
    async with scene.open:
        yield scene
