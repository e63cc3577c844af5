"""The roles of a worker: who decodes the chunks that it denoises, and a worker that only decodes."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from turboserve import logs
from turboserve.allocation.roles import RoleCapacity, chunks_per_s
from turboserve.service import Runtime
from turboserve.worker.engine.budget import decode_bytes
from turboserve.worker.engine.decode_jobs import (
    CachedDecoder,
    CacheTable,
    DecodeJob,
)
from turboserve.worker.engine.decoding_apart import OWN_CACHES, DecodingApart
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import BudgetTooSmallError
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.interface import Decoder
from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.remote_decoding.chunk_time import ChunkTime
from turboserve.worker.remote_decoding.client import DecodeClient
from turboserve.worker.remote_decoding.ports import RolePorts
from turboserve.worker.remote_decoding.server import DecodeServer, DecodeTimes
from turboserve.worker.service.decode_measurement import (
    MEASURED_CHUNKS,
    clock_of,
    measured_again,
    seconds_by_rows,
    warm_up,
)
from turboserve.worker.service.models import decodes_at_once, free_bytes
from turboserve.worker.service.role_serving import Listen, at_interface, serve_role
from turboserve.worker.settings import Settings, addresses_of
from turboserve.worker.transfer.interface import Interface, confine_libraries, find_interface
from turboserve.worker.transfer.links import Links

KEEP_S = 30.0
"""Time for which a decode worker keeps an unused cache, although another session has no room, seconds."""
MOST_CACHES = 1_024

log = logs.get("decoding")
Spawn = Callable[[Coroutine[Any, Any, Any], str], object]


@runtime_checkable
class DecodesApart(Protocol):
    """A backend whose sessions may have no decoder's caches."""

    apart: DecodingApart | None


def decoding_apart(engine: Engine) -> DecodingApart | None:
    """How an engine of the role `denoise` decodes. None: it has the role `decode` as well."""
    backend = engine.backend
    return backend.apart if isinstance(backend, DecodesApart) else None


def decode_elsewhere(
    worker: str, engine: Engine, settings: Settings, capacity: int, spawn: Spawn, ports: RolePorts
) -> DecodeClient:
    """Have the engine's chunks decoded by the configured decode workers, as soon as each is reached.

    `capacity`: K of the worker.
    """
    apart = decoding_apart(engine)
    assert apart is not None
    client = DecodeClient(
        worker,
        engine.fingerprint,
        engine.config,
        addresses_of(settings.decode_workers),
        key_of(settings),
        settings.decode_timeout_s,
        capacity,
        OWN_CACHES,
        ports,
        payload_links(settings, ports.interface, engine.device, engine.fingerprint),
    )
    apart.remote = client
    spawn(client.run(), "decode workers")
    return client


def payload_links(
    settings: Settings, interface: Interface | None, device: torch.device, fingerprint: str
) -> Links | None:
    """The links over which latents and frames pass, by the backends of migrations. None: no interface."""
    if interface is None:
        return None
    return Links(settings.transfer_backends, device, fingerprint, interface)


def key_of(settings: Settings) -> bytes:
    """The key of the decode workers, 32 bytes."""
    assert settings.decode_key is not None
    return hashlib.sha256(settings.decode_key.get_secret_value().encode()).digest()


class _NoFrames:
    """See `RemoteDecoder`. Decodes nothing, in no time."""

    def decode(self, jobs: Sequence[DecodeJob]) -> list[Tensor | None]:
        return [torch.empty(0, dtype=torch.uint8) for _ in jobs]


@contextmanager
def without_decoding(engine: Engine) -> Iterator[None]:
    """Leave out the decoding of an engine of the role `denoise` while its chunks are measured.

    Its own decoder is warmed up before: it is needed when the decode workers fail, and late then.
    """
    apart = decoding_apart(engine)
    if apart is None:
        yield
        return
    warm_up(apart.decoder, engine.config, engine.device)
    before, apart.remote = apart.remote, _NoFrames()
    try:
        yield
    finally:
        apart.remote = before


@dataclass(frozen=True)
class LoadedDecoder:
    """A decoder without the networks beside it."""

    decoder: Decoder
    config: ModelConfig
    fingerprint: str
    device: torch.device
    room: int
    """Number of caches that the device memory holds."""
    by_rows: Mapping[int, float]
    """Time of a decode at the start by its number of sessions, seconds by `clock_of(device)`."""

    @property
    def seconds(self) -> float:
        """Time of one chunk at the start."""
        return self.by_rows[1]

    def sessions(self, margin: float, seconds: float) -> int:
        """Sessions that it decodes in real time, if a chunk takes `seconds`.

        `margin`: part of the time that decoding may take.
        """
        one = RoleCapacity(chunks_per_s({1: seconds}), self.room)
        return one.of(1, margin * self.config.chunk_media_s)


def load_decoder(settings: Settings, load: Callable[[Settings], Models]) -> LoadedDecoder:
    """Load the model, and keep its decoder. Raises `BudgetTooSmallError` and the errors of `load`."""
    models = load(settings)
    device = models.transformer.patch_embedding.weight.device
    decoder, config, fingerprint, working = (
        models.decoder,
        models.transformer.config,
        models.fingerprint,
        decode_bytes(models),
    )
    rows = decodes_at_once(models, settings, memory_bytes(settings, device, decoder))
    del models
    free_networks(device)
    room = caches_that_fit(decoder, rows * working, memory_bytes(settings, device, decoder))
    by_rows = seconds_by_rows(decoder, config, device, min(rows, room))
    return LoadedDecoder(decoder, config, fingerprint, device, room, by_rows)


def free_networks(device: torch.device) -> None:
    """Free the memory of networks that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        # PyTorch keeps their memory, and the device does not count it as free.
        torch.cuda.empty_cache()


def memory_bytes(settings: Settings, device: torch.device, decoder: Decoder) -> int:
    """Device memory for the decoder and its caches, as `TURBOSERVE_MEMORY_BYTES` says."""
    return settings.memory_bytes or free_bytes(device) + decoder.weight_bytes


def caches_that_fit(decoder: Decoder, working_bytes: int, total_bytes: int) -> int:
    """Number of caches that fit beside the decoder. Raises `BudgetTooSmallError` if none does."""
    taken = decoder.weight_bytes + working_bytes
    room = (total_bytes - taken) // max(1, decoder.cache_bytes)
    if room < 1:
        raise BudgetTooSmallError(taken + decoder.cache_bytes, total_bytes)
    return min(room, MOST_CACHES)


async def start_decode_worker(
    runtime: Runtime, settings: Settings, load: Callable[[Settings], Models], name: str
) -> None:
    """Load the decoder and serve the workers that prove the key. `name`: the worker's id.

    Raises the errors of `load_decoder`, `InterfaceError` and `OSError`.
    """
    listening, interface = at_interface(settings), find_interface(settings.transfer_host)
    loaded = await asyncio.to_thread(load_decoder, settings, load)
    confine_libraries(interface)
    await serve_decoder(runtime, settings, loaded, name, listening, interface=interface)


async def serve_decoder(
    runtime: Runtime,
    settings: Settings,
    loaded: LoadedDecoder,
    name: str,
    listening: Listen,
    thread: Executor | None = None,
    device_clock: Callable[[], float] | None = None,
    interface: Interface | None = None,
) -> DecodeServer:
    """Serve workers with a loaded decoder, until the runtime stops. Raises `OSError`.

    `thread`: see `RoleServer`. `device_clock`: that of the times of a chunk. None: the device's own.
    `interface`: at which links listen. None: payloads pass over connections.
    """
    now = runtime.clock.monotonic
    decoder = CachedDecoder(loaded.decoder, loaded.device, CacheTable(loaded.room, KEEP_S), now)
    clock = device_clock or clock_of(loaded.device)
    times = DecodeTimes(
        ChunkTime(loaded.seconds),
        partial(loaded.sessions, settings.real_time_margin),
        LatencyProfile(loaded.by_rows),
        max(loaded.by_rows),
        clock,
    )
    model, config, key = loaded.fingerprint, loaded.config, key_of(settings)
    links = payload_links(settings, interface, loaded.device, model)
    served = DecodeServer(name, model, config, decoder, key, now, times, thread, links)
    address = await serve_role(runtime, served, listening, "decode server")
    probe = partial(measured_again, loaded.decoder, loaded.config, loaded.device, clock)
    runtime.spawn(served.measure_idle(probe, MEASURED_CHUNKS), "decode time")
    log.info(
        "decode worker serves",
        worker=name,
        address=address,
        device=str(loaded.device),
        caches=loaded.room,
        chunk_s=round(loaded.seconds, 4),
        chunks_at_once=LatencyProfile(loaded.by_rows).paying_batch(max(loaded.by_rows)),
        sessions=served.sessions,
    )
    return served
