"""Many paced workers in one process: `python -m turboserve.experiments.scale.workers`.

The first line of standard input is a `Hosted`.

Each worker is the production worker on its own connection to the real broker, with its own identity. Only the
device is virtual: computations take their declared time, states have their declared bytes, and every chunk is
the same encoded fragment at another place of its stream. States migrate over the production data plane. The
process ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import cast

import numpy as np
from pydantic import SecretStr

from turboserve import logs, program_start
from turboserve.bench.paced.fragments import shifted
from turboserve.broker_accounts import worker_user
from turboserve.bus import Bus
from turboserve.contracts.errors import TurboServeError
from turboserve.experiments.scale.hosted import Hosted
from turboserve.service import Runtime, run_service
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.fabric import TransferFabric
from turboserve.simulation.runtime.device.packager import VirtualEncoder
from turboserve.simulation.runtime.device.platform import VirtualPlatform
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady
from turboserve.worker.media import EncodedChunk, FragmentEncoder
from turboserve.worker.service import app
from turboserve.worker.settings import Settings
from turboserve.worker.transfer.interface import find_interface
from turboserve.worker.transfer.network import SocketNetwork

SIDE = 32
HEADER_BYTES = 8
RESTART_S = 1.0
CONNECTS_AT_ONCE = 8
"""Number of workers that join at the same time."""

log = logs.get("scale")


def profile_of(hosted: Hosted) -> DeviceProfile:
    """Return a device that serves `slots` sessions at 60 % of real time, in one event for each chunk."""
    alone, slots = DeviceProfile(), hosted.slots
    chunk_s = 0.6 * alone.config.chunk_media_s
    forward_s = (chunk_s - alone.decode_s[1]) / (alone.denoising + 1)
    return DeviceProfile(
        forward_s={1: 0.2 * forward_s, slots: forward_s} if slots > 1 else {1: forward_s},
        load_s=0.0,
        slabs=slots,
        host_states=2 * slots,
        state_bytes=hosted.state_bytes,
        host_bytes_per_s=1e9,
        chunk_at_once=True,
    )


class PacedEncoder(VirtualEncoder):
    """Repeats the fragments that were encoded once, padded to the declared size."""

    def __init__(self, engine: Engine, seconds: float, clock: DeviceClock, chunk_bytes: int) -> None:
        super().__init__(engine.config, seconds, clock)
        self._chunk_bytes = chunk_bytes
        self._encoded: dict[int, EncodedChunk] = {}
        """Encoded chunks by their number of frames."""

    def encode(self, ready: ChunkReady, first_frame: int, fps: int) -> EncodedChunk:
        """See `ChunkEncoder.encode`."""
        frames = super().encode(ready, first_frame, fps).frames
        if frames not in self._encoded:
            self._encoded[frames] = encoded(frames, fps, self._chunk_bytes)
        chunk = self._encoded[frames]
        fragment = shifted(chunk.fragment, ready.index, first_frame, fps)
        return EncodedChunk(chunk.init, fragment, chunk.codec, chunk.width, chunk.height, frames)


def encoded(frames: int, fps: int, least_bytes: int) -> EncodedChunk:
    gray = np.full((frames, SIDE, SIDE, 3), 128, dtype=np.uint8)
    chunk = FragmentEncoder().encode(gray, index=0, first_frame=0, fps=fps)
    missing = max(least_bytes - len(chunk.fragment) - HEADER_BYTES, 0)
    # A player skips a box of the type `free`.
    padding = (missing + HEADER_BYTES).to_bytes(4, "big") + b"free" + bytes(missing)
    return EncodedChunk(chunk.init, chunk.fragment + padding, chunk.codec, chunk.width, chunk.height, frames)


@dataclass
class PacedPlatform(VirtualPlatform):
    """A virtual device on the machine's own clock and network."""

    chunk_bytes: int = 2_048

    def encoder(self, engine: Engine, clock: DeviceClock) -> VirtualEncoder:
        """See `VirtualPlatform.encoder`."""
        return PacedEncoder(engine, self.profile.package_s, clock, self.chunk_bytes)

    def network(self, engine: Engine) -> SocketNetwork:  # type: ignore[override]
        """See `Platform.network`."""
        settings = self.settings
        return SocketNetwork(
            find_interface(settings.transfer_host),
            settings.transfer_port,
            settings.transfer_backends,
            engine.device,
            engine.fingerprint,
        )


async def serve(hosted: Hosted) -> None:
    """Run all workers until this process is cancelled. A worker that ends is started again."""
    joining = asyncio.Semaphore(CONNECTS_AT_ONCE)
    async with asyncio.TaskGroup() as group:
        for identity, password in hosted.identities.items():
            group.create_task(_worker(hosted, identity, password, joining))


async def _worker(hosted: Hosted, identity: str, password: str, joining: asyncio.Semaphore) -> None:
    settings = Settings(
        nats_url=hosted.nats_url,
        nats_user=worker_user(identity),
        nats_password=SecretStr(password),
        worker_max_sessions=hosted.slots,
        transfer_backends=("shm",),
    )
    while True:
        try:
            async with joining:
                bus = await Bus.connect("worker", settings)
            await _incarnation(hosted, identity, Runtime("worker", settings, bus))
        except (TurboServeError, OSError) as error:
            log.warning("worker ended", identity=identity, error=repr(error))
        await asyncio.sleep(RESTART_S)


async def _incarnation(hosted: Hosted, identity: str, runtime: Runtime) -> None:
    settings = cast(Settings, runtime.settings)

    def leave(reason: str) -> None:
        log.warning("declared gone", identity=identity, reason=reason)
        runtime.stopping.set()

    # The fabric is the simulation's data plane, which this platform does not use.
    fabric = cast(TransferFabric, None)
    platform = PacedPlatform(
        profile_of(hosted), settings, runtime.clock, fabric, identity, leave, chunk_bytes=hosted.chunk_bytes
    )

    async def start(runtime: Runtime) -> None:
        await app.compose(runtime, settings, platform)

    await run_service(runtime, start)


async def _until_closed() -> None:
    """Run what the first line of standard input describes, until standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    # A full collection of 50 workers' objects stops all of them for 0.2 s.
    program_start.collect_rarely()
    serving = asyncio.create_task(serve(Hosted(**json.loads(await reader.readline()))))
    closed = asyncio.create_task(reader.read())
    done, _ = await asyncio.wait((serving, closed), return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    if serving in done:
        serving.result()


if __name__ == "__main__":
    logs.setup("worker", Settings())
    asyncio.run(_until_closed())
