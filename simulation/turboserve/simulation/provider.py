"""A pool provider whose workers are simulated processes. They outlive the autoscaler that started them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    OnExit,
    PoolProvider,
    ProviderError,
    ProviderWorker,
)
from turboserve.simulation.service import ServiceProcess

if TYPE_CHECKING:
    from turboserve.simulation.world import World

POLL_S = 0.1


@dataclass
class Machine:
    """A worker's process in its pool member."""

    member: str
    worker: ServiceProcess


class Machines:
    """All machines that providers have launched."""

    def __init__(self, launch: Callable[[str, str], ServiceProcess]) -> None:
        """`launch(member, worker)` creates the process and starts it."""
        self.by_worker: dict[str, Machine] = {}
        self._launch = launch
        self._watchers: list[tuple[OnExit, Context, float]] = []

    def launch(self, member: str, worker: str) -> None:
        """Start a worker. Raises `LaunchError` if the pool member has a living worker."""
        if any(machine.member == member for machine in self.living()):
            raise LaunchError(f"{member} is occupied")
        self.by_worker[worker] = Machine(member, self._launch(member, worker))

    def living(self) -> list[Machine]:
        return [machine for machine in self.by_worker.values() if machine.worker.alive]

    def watch(self, on_exit: OnExit, delay_s: float) -> None:
        """Report exits to `on_exit`, in the process that calls this."""
        self._watchers.append((on_exit, copy_context(), delay_s))

    def exited(self, worker: str, why: str, loop: asyncio.AbstractEventLoop) -> None:
        """Report the end of a worker's process to the watchers."""
        for on_exit, context, delay_s in self._watchers:
            loop.call_later(delay_s, on_exit, worker, why, context=context)


class SimulatedProvider(PoolProvider):
    """See `PoolProvider`. Each process of the autoscaler has its own provider over the same machines."""

    name = "simulated"

    def __init__(self, world: World) -> None:
        self._world = world

    def watch(self, on_exit: OnExit) -> None:
        self._world.machines.watch(on_exit, self._world.faults.delay_s)

    async def adopt(self) -> list[ProviderWorker]:
        await self._work()
        living = self._world.machines.living()
        return [ProviderWorker(machine.member, machine.worker.name, 1) for machine in living]

    async def reserve(self, member: str) -> None:
        await self._work()

    async def launch(self, member: str, worker: str) -> ProviderWorker:
        await self._work()
        self._world.machines.launch(member, worker)
        return ProviderWorker(member, worker, 1)

    async def ready(self, worker: str) -> bool:
        machine = self._world.machines.by_worker.get(worker)
        runtime = None if machine is None or not machine.worker.alive else machine.worker.runtime
        return runtime is not None and all(runtime.checks().values())

    async def drain(self, worker: str) -> None:
        await self._work()

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        await self._work()
        machine = self._world.machines.by_worker.get(worker or "")
        if machine is None or not machine.worker.alive:
            return
        machine.worker.stop()
        deadline = self._world.loop.time() + grace_s
        while machine.worker.alive and self._world.loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        machine.worker.kill("released")

    async def health(self) -> Health:
        return Health(ok=True)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    async def _work(self) -> None:
        world = self._world
        await asyncio.sleep(world.random.expovariate(1.0 / world.faults.delay_s))
        if world.random.random() < world.faults.provider_fails:
            raise ProviderError("the provider failed", retry_after_s=0.5)
