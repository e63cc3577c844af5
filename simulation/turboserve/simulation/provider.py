"""A pool provider whose workers are simulated processes. They outlive the autoscaler that started them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from random import Random
from typing import Protocol

from turboserve.autoscaler.providers.base import (
    Health,
    LaunchError,
    OnExit,
    PoolProvider,
    ProviderError,
    ProviderWorker,
)
from turboserve.simulation.faults import Faults
from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.service import ServiceProcess

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


class ProviderHost(Protocol):
    """The deployment as its pool provider uses it."""

    loop: VirtualLoop
    random: Random
    faults: Faults
    machines: Machines


class SimulatedProvider(PoolProvider):
    """See `PoolProvider`. Each process of the autoscaler has its own provider over the same machines."""

    name = "simulated"

    def __init__(self, host: ProviderHost) -> None:
        self._host = host

    def watch(self, on_exit: OnExit) -> None:
        self._host.machines.watch(on_exit, self._host.faults.delay_s)

    async def adopt(self) -> list[ProviderWorker]:
        await self._work()
        living = self._host.machines.living()
        return [ProviderWorker(machine.member, machine.worker.name, 1) for machine in living]

    async def reserve(self, member: str) -> None:
        await self._work()

    async def launch(self, member: str, worker: str) -> ProviderWorker:
        await self._work()
        self._host.machines.launch(member, worker)
        return ProviderWorker(member, worker, 1)

    async def ready(self, worker: str) -> bool:
        machine = self._host.machines.by_worker.get(worker)
        runtime = None if machine is None or not machine.worker.alive else machine.worker.runtime
        return runtime is not None and all(runtime.checks().values())

    async def drain(self, worker: str) -> None:
        await self._work()

    async def release(self, member: str, worker: str | None, grace_s: float) -> None:
        await self._work()
        machine = self._host.machines.by_worker.get(worker or "")
        if machine is None or not machine.worker.alive:
            return
        machine.worker.stop()
        deadline = self._host.loop.time() + grace_s
        while machine.worker.alive and self._host.loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        machine.worker.kill("released")

    async def health(self) -> Health:
        return Health(ok=True)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    async def _work(self) -> None:
        host = self._host
        await asyncio.sleep(host.random.expovariate(1.0 / host.faults.delay_s))
        if host.random.random() < host.faults.provider_fails:
            raise ProviderError("the provider failed", retry_after_s=0.5)
