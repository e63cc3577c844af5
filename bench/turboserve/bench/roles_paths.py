"""Latents to a decode worker in another process, and frames back: time and processor time of a chunk by path.

The worker's own client and server, with a decoder that returns frames without computing. Chunks go over the
paths in turns, so that what else the machine does slows all of them down alike. `tcp` is the connection
itself. `gloo` and `shm` are links of the transfer's backends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from typing import TYPE_CHECKING, Any

from turboserve.bench.report import BenchError, percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from turboserve.worker.model.config import ModelConfig
    from turboserve.worker.remote_decoding.client import DecodeClient

PATHS = ("tcp", "gloo", "shm")
MODELS = ("toyworld", "longlive-1-3b")
ROUNDS = 8
WARM_UP = 3
KEY, MODEL, HOST = bytes(32), "bench", "127.0.0.1"
LIMIT_S = 60.0
Start = Callable[[str], AbstractContextManager[tuple[object, Connection, int]]]
"""Model → a decode worker, its pipe, and its port."""


def config_of(model: str) -> ModelConfig:
    """The configuration of a model by name."""
    from turboserve.worker.model.presets import preset
    from turboserve.worker.model.toyworld import read_toyworld

    return read_toyworld().config if model == "toyworld" else preset(model)


class _NoDecoder:
    """Returns black frames of the model's size."""

    cache_bytes, weight_bytes, workspace_bytes = 1, 0, 0

    def __init__(self, config: ModelConfig) -> None:
        import torch

        width, height = config.frame_size
        self._more = config.frames_per_latent
        count = config.latent_shape[0] * self._more
        self._frames = torch.zeros((1, count, height, width, 3), dtype=torch.uint8)

    def decode(self, latents: Tensor, caches: Any) -> tuple[Tensor, list[dict[str, Tensor]]]:
        return self._frames[:, 0 if caches else self._more - 1 :], [{}]


def decode_worker(pipe: Connection, model: str) -> None:
    """Decode until a message that is false. Sends the port, then the processor time for each message."""
    import torch

    torch.set_num_threads(1)
    asyncio.run(_serve(pipe, config_of(model)))


def _own_process(pipe: Connection, model: str) -> None:
    from turboserve.worker.remote_decoding import linking, role_server, server
    from turboserve.worker.transfer import links, pair

    # A busy machine is slow, not broken.
    for module, limit in (
        (links, "CONNECT_S"),
        (linking, "LINK_S"),
        (pair, "PROGRESS_S"),
        (role_server, "ADMIT_S"),
        (server, "ANSWER_S"),
    ):
        setattr(module, limit, LIMIT_S)
    decode_worker(pipe, model)


async def _serve(pipe: Connection, config: ModelConfig) -> None:
    import torch

    from turboserve.tasks import stop
    from turboserve.worker.engine.decode_jobs import CachedDecoder, CacheTable
    from turboserve.worker.remote_decoding.chunk_time import ChunkTime
    from turboserve.worker.remote_decoding.server import DecodeServer, DecodeTimes
    from turboserve.worker.transfer.links import Links
    from turboserve.worker.transfer.network import listen

    cpu = torch.device("cpu")
    cached = CachedDecoder(_NoDecoder(config), cpu, CacheTable(len(PATHS)))
    times = DecodeTimes(ChunkTime(1.0), lambda _: len(PATHS))
    links = Links(("shm", "gloo"), cpu, MODEL)
    served = DecodeServer("decoder", MODEL, config, cached, KEY, time.monotonic, times, links=links)
    listener, port = await listen(served.serve, HOST, 0)
    running = asyncio.create_task(served.run())
    pipe.send(port)
    # Each message asks for the processor time so far. The last one ends the process.
    while await asyncio.to_thread(pipe.recv):
        pipe.send(time.process_time())
    listener.close()
    await stop(running)


@contextmanager
def worker_process(model: str) -> Iterator[tuple[BaseProcess, Connection, int]]:
    """A decode worker in a process of its own: the process, its pipe, its port."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_own_process, args=(theirs, model), daemon=True
    )
    process.start()
    try:
        if not ours.poll(LIMIT_S):
            raise BenchError(f"the decode worker of {model} did not start within {LIMIT_S:g} s")
        yield process, ours, ours.recv()
        if process.is_alive():
            ours.send(False)
            process.join(LIMIT_S)
    finally:
        process.kill()
        process.join()


@asynccontextmanager
async def clients_of(config: ModelConfig, port: int) -> AsyncIterator[dict[str, DecodeClient]]:
    """A client for each path, connected."""
    import torch

    from turboserve.tasks import stop
    from turboserve.worker.remote_decoding.client import DecodeClient
    from turboserve.worker.transfer.links import Links

    address, cpu, running = f"tcp://{HOST}:{port}", torch.device("cpu"), []
    made: dict[str, DecodeClient] = {}
    try:
        for path in PATHS:
            links = None if path == "tcp" else Links((path,), cpu, MODEL)
            made[path] = DecodeClient(path, MODEL, config, [address], KEY, LIMIT_S, 1, links=links)
            running.append(asyncio.create_task(made[path].run()))
            async with asyncio.timeout(LIMIT_S):
                await made[path].wait_until_known(LIMIT_S)
            if made[path].link_kinds != ("" if path == "tcp" else path):
                raise BenchError(f"{path}: no link could be made on this machine")
        yield made
    finally:
        for task in running:
            await stop(task)


def measured(model: str, chunks: int, start: Start | None = None) -> dict[str, Any]:
    """Measure all paths for one model's sizes, with so many chunks on each.

    `start`: starts the decode worker. None: in a process of its own.
    """
    config = config_of(model)
    with (start or worker_process)(model) as (_, pipe, port):
        return asyncio.run(_measured(config, pipe, port, chunks))


async def _measured(config: ModelConfig, pipe: Connection, port: int, chunks: int) -> dict[str, Any]:
    import torch

    width, height = config.frame_size
    latents = torch.randn(config.latent_shape)
    found = {path: _Path(path, latents) for path in PATHS}
    async with clients_of(config, port) as clients:
        for path in PATHS:
            await found[path].run(clients[path], pipe, WARM_UP)
            found[path].forget()
        for _ in range(ROUNDS):
            for path in PATHS:
                await found[path].run(clients[path], pipe, max(1, chunks // ROUNDS))
    frames = config.latent_shape[0] * config.frames_per_latent
    results = {path: one.result() for path, one in found.items()}
    return {
        "latent_bytes": latents.nbytes,
        "frame_bytes": frames * width * height * 3,
        "paths": results,
        "to_tcp": {
            path: {key: results[path][key] / results["tcp"][key] for key in ("median_s", "processor_s")}
            for path in PATHS
            if path != "tcp"
        },
    }


class _Path:
    """One session whose chunks go one way."""

    def __init__(self, name: str, latents: Tensor) -> None:
        self._name, self._latents = name, latents
        self._index = 0
        self._base: str | None = None
        self.forget()

    def forget(self) -> None:
        """Begin to measure."""
        self._seconds: list[float] = []
        self._home_s = self._decoder_s = 0.0

    async def run(self, client: DecodeClient, pipe: Connection, chunks: int) -> None:
        """Have so many chunks decoded, one after the other."""
        from turboserve.worker.engine.decode_jobs import DecodeJob, digest_of_latents

        jobs = []
        for _ in range(chunks):
            digest = digest_of_latents(self._index, self._latents)
            jobs.append(DecodeJob(self._name, self._index, self._latents, self._base, digest, ()))
            self._base, self._index = digest, self._index + 1
        decoder_s, home_s = _processor_s(pipe), time.process_time()
        self._seconds += await asyncio.to_thread(_decode, client, jobs)
        self._home_s += time.process_time() - home_s
        self._decoder_s += _processor_s(pipe) - decoder_s

    def result(self) -> dict[str, float]:
        """The times of a chunk, seconds."""
        count = len(self._seconds)
        return {
            "median_s": median(self._seconds),
            "p95_s": percentile(self._seconds, 0.95) or 0.0,
            "home_processor_s": self._home_s / count,
            "decoder_processor_s": self._decoder_s / count,
            "processor_s": (self._home_s + self._decoder_s) / count,
        }


def _decode(client: DecodeClient, jobs: Sequence[Any]) -> list[float]:
    seconds = []
    for job in jobs:
        began = time.perf_counter()
        [frames] = client.decode([job])
        seconds.append(time.perf_counter() - began)
        if frames is None:
            raise BenchError("a chunk was not decoded in time: the machine is too busy")
    return seconds


def _processor_s(pipe: Connection) -> float:
    pipe.send(True)
    found: float = pipe.recv()
    return found


def batches(rows: int, rounds: int = 5) -> dict[str, Any]:
    """Measure toyworld's decoder with up to so many sessions at once, as a decode worker does at its start.

    `gain`: chunks in the time of one that is decoded alone.
    """
    import torch

    from turboserve.worker.engine.gather import LatencyProfile
    from turboserve.worker.replicas.toyworld import load_toyworld
    from turboserve.worker.service.decode_measurement import seconds_by_rows

    models = load_toyworld()
    config = models.transformer.config
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [seconds_by_rows(models.decoder, config, torch.device("cpu"), rows) for _ in range(rounds)]
    finally:
        torch.set_num_threads(threads)
    seconds = {count: median(run[count] for run in runs) for count in runs[0]}
    return {
        "model": "toyworld",
        "seconds": {str(count): each for count, each in seconds.items()},
        "gain": {str(count): median(count * run[1] / run[count] for run in runs) for count in seconds},
        "chosen": LatencyProfile(seconds).paying_batch(max(seconds)),
    }
