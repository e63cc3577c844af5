"""A worker on a paced device: `python -m turboserve.bench.paced.worker DEVICE`, with `PacedDevice.to_json`.

Only the device differs. Everything else is the worker of production.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import sys
import time

import psutil

from turboserve import service
from turboserve.bench.paced.device import PacedDevice, paced
from turboserve.bench.paced.fragments import RepeatingEncoder
from turboserve.clock import Clock
from turboserve.service import Runtime
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.replicas.weight_filler import WeightFiller
from turboserve.worker.service.app import start_on
from turboserve.worker.service.host_platform import HostPlatform
from turboserve.worker.service.models import load_models, make_engine
from turboserve.worker.service.packager import ChunkEncoder
from turboserve.worker.service.ports import Loaded
from turboserve.worker.service.warm_up import BATCHES
from turboserve.worker.settings import Settings


class PacedPlatform(HostPlatform):
    """This machine with a paced device. Its L(b) is declared: a warm-up on a CPU measures no sleep."""

    def __init__(self, device: PacedDevice, settings: Settings, clock: Clock) -> None:
        """Raises the errors of `HostPlatform`."""
        super().__init__(settings, clock, lambda settings: paced(load_models(settings), device))
        self._paced = device

    async def load(self, filler: WeightFiller | None = None) -> Loaded:
        """See `Platform.load`."""
        loaded = await super().load(filler)
        await asyncio.sleep(psutil.Process().create_time() + self._paced.start_s - time.time())
        return loaded

    def encoder(self, engine: Engine) -> ChunkEncoder:
        """See `HostPlatform.encoder`."""
        encoder = super().encoder(engine)
        return encoder if self._paced.encodes else RepeatingEncoder(encoder)

    def _loaded(self, filler: WeightFiller | None) -> Loaded:
        if not self._paced.forward_s:
            return super()._loaded(filler)
        engine, forward = make_engine(self._load(self._settings), self._settings), self._paced.forward_s
        chunk_s = {
            size: engine.config.chunk_forwards * LatencyProfile(forward)(size)
            for size in BATCHES
            if size <= engine.slabs
        }
        return Loaded(engine, chunk_s)


def pin(member: str | None) -> None:
    """Let this process run only on the core of its member's number."""
    number = re.search(r"\d+$", member or "")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(number[0]) % len(cores) if number else 0]})


async def start(runtime: Runtime, device: PacedDevice) -> None:
    """Compose the worker."""
    settings = runtime.settings
    assert isinstance(settings, Settings)
    if device.pinned:
        pin(settings.pool_member)
    await start_on(runtime, PacedPlatform(device, settings, runtime.clock))


if __name__ == "__main__":
    chosen = PacedDevice.from_json(sys.argv[1])
    service.run("worker", service.load("worker", Settings), functools.partial(start, device=chosen))
