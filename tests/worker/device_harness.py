"""A worker's device alone, real or virtual: commands in, and the output of its packager."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from random import Random
from typing import Any, TypeVar

from turboserve.clock import SystemClock
from turboserve.simulation.runtime.device.fabric import TransferFabric
from turboserve.simulation.runtime.device.platform import VirtualPlatform
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.service import HostClock
from turboserve.worker.engine.backend import ReceiveBuffer
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import EngineOptions
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.service import commands, events
from turboserve.worker.service.engine_commands import AdmitRequest, FetchedContext
from turboserve.worker.service.host_memory import state_host_bytes
from turboserve.worker.service.host_platform import HostPlatform
from turboserve.worker.service.packager import PackagedChunk, ToLoop
from turboserve.worker.service.ports import EngineRunner, Packager, Platform
from turboserve.worker.settings import Settings

PATIENCE_S = 120.0
SLABS, HOST_STATES, LEAD_S = 2, 1, 2.0
LED = 3
"""Chunks that start within the lead of a viewer at the beginning."""
T = TypeVar("T")


class DeviceHarness:
    """A running device and its deliveries. It belongs to the loop on which it was created."""

    def __init__(self, platform: Platform, engine: Engine) -> None:
        self.delivered: asyncio.Queue[ToLoop] = asyncio.Queue()
        device = platform.run(engine, self.delivered.put_nowait)
        self._markers = 0
        self.runner: EngineRunner = device.engine
        self.packager: Packager = device.packager
        self.packager.start()
        self.runner.start()

    def submit(self, *commands: Any) -> None:
        for command in commands:
            self.runner.submit(command)

    def generate(self) -> None:
        self.submit(commands.GenerateUntil(math.inf))

    def admit(
        self, run: int, next_chunk: int = 0, session: str = "a", prompt: str = "a red circle", **rest: Any
    ) -> None:
        playhead_s = next_chunk * 0.75
        admit = commands.Admit(session, run, next_chunk, prompt, 7, 0, playhead_s)
        self.runner.submit(AdmitRequest(admit, FetchedContext(**rest)))

    async def next(self, *kinds: type[Any]) -> Any:
        """Return the next delivery of one of these kinds; others are dropped."""
        while not isinstance(item := await self._delivery(), kinds):
            pass
        return item

    async def _delivery(self) -> ToLoop:
        async with asyncio.timeout(PATIENCE_S):
            return await self.delivered.get()

    async def chunk(self, session: str = "a") -> PackagedChunk:
        while (chunk := await self.next(PackagedChunk, events.RunFailed)).session != session:
            pass
        assert isinstance(chunk, PackagedChunk), chunk
        return chunk

    async def call(self, function: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self.runner.call(function))

    async def settled(self) -> None:
        """Wait until all work is done: the engine has run several rounds since without any."""
        busy = True
        while busy:
            turns, async_busy = self.runner.turns, False
            while self.runner.turns < turns + 3:
                assert self.runner.failure is None
                await asyncio.sleep(0.05)
                async_busy |= await self.call(self._busy)
            busy = async_busy

    async def callbacks_run(self) -> None:
        """Wait until the loop has run all callbacks that any thread has scheduled so far."""
        loop = asyncio.get_running_loop()
        passed = loop.create_future()
        loop.call_soon_threadsafe(passed.set_result, None)
        await passed

    def _busy(self, engine: Engine) -> bool:
        # Between two chunks no session is busy, and the next step begins one.
        runner: Any = self.runner
        begins = runner._driver.idle_s() == 0.0
        return begins or engine.executors_busy or any(session.busy for session in engine.sessions.values())

    async def received_so_far(self, kind: type[T]) -> list[T]:
        """Return the deliveries of this kind up to now, once the device has settled."""
        await self.settled()
        # The packager must settle too: all earlier items have passed it when a later one has.
        self._markers += 1
        marker = events.ControlTookEffect("marker", 0, self._markers)
        packager: Any = self.packager
        await self.call(lambda _: packager.put(marker))
        found: list[T] = []
        while (item := await self._delivery()) != marker:
            if isinstance(item, kind):
                found.append(item)
        return found

    async def quiesced(self, session: str) -> tuple[Mapping[str, Any], dict[str, list[Any]]]:
        """Return header and pages of a quiesced session, copied."""
        header, pages = await self.call(lambda engine: engine.export_session(session))
        return header, {page.name: [page, [part.clone() for part in page.parts]] for page in pages}

    async def reserve(self, *, on_host: bool) -> ReceiveBuffer:
        return await self.call(lambda engine: engine.reserve(on_host=on_host))

    async def adopt(
        self, buffer: ReceiveBuffer, header: Mapping[str, Any], pages: Mapping[str, list[Any]], run: int
    ) -> None:
        fill(buffer, pages)
        names: Iterable[str] = list(pages)
        await asyncio.wrap_future(
            self.runner.adopt(
                str(header["session"]),
                run,
                lambda engine: engine.import_session(buffer, header, names, 0.0),
            )
        )

    async def close(self) -> None:
        await self.runner.end(PATIENCE_S)
        await self.packager.end(PATIENCE_S)


def fill(buffer: ReceiveBuffer, pages: Mapping[str, list[Any]]) -> None:
    """Write pages as a transfer does."""
    buffer.begin()
    for name, (page, parts) in pages.items():
        for target, source in zip(buffer.place(name, page.size, page.dtype, page.shape), parts, strict=True):
            target.copy_(source)


class Kind(ABC):
    """A kind of device, and the loop that it runs on."""

    fails: str
    """Prompt of a session whose computation fails."""

    @abstractmethod
    def play(
        self, scenario: Callable[[Callable[[], Awaitable[DeviceHarness]]], Coroutine[Any, Any, None]]
    ) -> None:
        """Run a scenario, which receives a factory of harnesses. They are closed after it."""

    @abstractmethod
    async def time_passes(self) -> None:
        """Let everything happen that an ended device could still do."""


class Tensors(Kind):
    """A machine with a tiny model, on threads."""

    def __init__(self, models: Callable[[ModelConfig], Models], config: ModelConfig) -> None:
        self._models, self._config = models, config

    def play(
        self, scenario: Callable[[Callable[[], Awaitable[DeviceHarness]]], Coroutine[Any, Any, None]]
    ) -> None:
        asyncio.run(_played(scenario, self._harness))

    async def _harness(self) -> DeviceHarness:
        settings = Settings(device="cpu")
        models = self._models(self._config)
        layout = SlabLayout.of(self._config, models.transformer.patch_embedding.weight.dtype)
        options = EngineOptions(
            slab_bytes=SLABS * layout.total_bytes,
            host_bytes=HOST_STATES * state_host_bytes(models),
            max_lead_s=LEAD_S,
            max_batch=SLABS,
        )
        return DeviceHarness(HostPlatform(settings, SystemClock(), lambda _: models), Engine(models, options))

    async def time_passes(self) -> None:
        # Its threads have ended.
        pass


class Virtual(Kind):
    """No tensors, no threads, and a clock that jumps."""

    def __init__(self, *, chunk_at_once: bool) -> None:
        self._profile = DeviceProfile(
            slabs=SLABS, host_states=HOST_STATES, load_s=0.0, chunk_at_once=chunk_at_once
        )

    def play(
        self, scenario: Callable[[Callable[[], Awaitable[DeviceHarness]]], Coroutine[Any, Any, None]]
    ) -> None:
        loop = VirtualLoop(1)
        fabric = TransferFabric(loop, Random(1))

        async def harness() -> DeviceHarness:
            settings = Settings(max_lead_s=LEAD_S)
            platform = VirtualPlatform(
                self._profile, settings, HostClock(loop), fabric, "a", lambda reason: None
            )
            platform.faults.failing.add("fails")
            return DeviceHarness(platform, (await platform.load()).engine)

        try:
            loop.run_until_complete(_played(scenario, harness))
        finally:
            loop.close()

    async def time_passes(self) -> None:
        # Virtual seconds: longer than any timer of a device.
        await asyncio.sleep(60.0)


async def _played(scenario: Any, make: Callable[[], Awaitable[DeviceHarness]]) -> None:
    harnesses: list[DeviceHarness] = []

    async def harness() -> DeviceHarness:
        harnesses.append(await make())
        return harnesses[-1]

    await scenario(harness)
    for each in harnesses:
        await each.close()
        assert each.runner.failure is None
