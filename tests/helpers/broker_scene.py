"""Processes on the virtual loop, each with a bus, around one broker in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

from nats.aio.msg import Msg
from nats.js import api

from turboserve.bus import Bus
from turboserve.config import Settings
from turboserve.simulation.runtime.broker import MemoryBroker, Network
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.process import Process
from turboserve.subjects import CHUNK, CHUNKS, OWN

T = TypeVar("T")


class Scene:
    """The processes and the broker. `latency_s` is for each direction, unless a network is given."""

    def __init__(self, network: Network | None = None, latency_s: float = 0.01, seed: int = 1) -> None:
        self.loop = VirtualLoop(seed)
        self.broker = MemoryBroker(random.Random(seed), network or Network(latency_s), loop=self.loop)
        self.processes: dict[str, Process] = {}
        self.buses: dict[str, Bus] = {}

    def close(self) -> None:
        self.loop.close()

    def run(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the process `name`. Returns its result."""
        return self.loop.run_until_complete(self.spawn(name, work))

    def spawn(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.loop.spawn(self.processes[name], work)

    def connect(self, name: str, user: str | None = None) -> Bus:
        """Start a process with a bus, which answers as `user` to requests' names."""
        self.processes[name] = Process(name)
        settings = Settings(nats_url=f"nats://{user or name}@memory")
        bus = self.run(name, Bus.connect(user or name, settings, self.broker.connect))
        self.buses[name] = bus
        return bus

    def hear(self, name: str, subject: str, queue: str = "") -> list[tuple[float, bytes]]:
        """Subscribe in the process. Returns a list that collects the time and the body of each message."""
        heard: list[tuple[float, bytes]] = []

        async def receive(message: Msg) -> None:
            heard.append((round(self.loop.time(), 6), message.data))

        async def listen() -> None:
            await self.buses[name].client.subscribe(subject, queue=queue, cb=receive)
            await self.buses[name].flush()

        self.run(name, listen())
        return heard

    def publish(self, name: str, subject: str, *bodies: bytes) -> None:
        async def send() -> None:
            for body in bodies:
                await self.buses[name].client.publish(subject, body)

        self.run(name, send())

    def make_stream(self, name: str = "state-store", **fields: Any) -> None:
        config = api.StreamConfig(
            name=CHUNKS,
            subjects=[OWN.every, CHUNK.every],
            allow_direct=True,
            republish=api.RePublish(src=">", dest="live.>"),
            **fields,
        )
        self.run(name, self.buses[name].jetstream(10.0).add_stream(config))
