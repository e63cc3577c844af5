"""As much of the bus and the clock as the services' own executors use."""

from __future__ import annotations

from typing import Any

from turboserve.bench.simulate.kernel import Kernel, Program
from turboserve.bench.simulate.network import DEADLINE_S, Network
from turboserve.contracts.requests import ListSessions, ListWorkers, SessionPage, WorkerPage
from turboserve.subjects import Endpoint, Topic


class VirtualBus:
    """`turboserve.bus.Bus`, over the simulated network. Pages are not cut: all rows fit into one."""

    def __init__(self, network: Network, program: Program) -> None:
        self._network, self._program = network, program

    async def call(
        self, endpoint: Endpoint[Any, Any], request: Any, *, deadline_s: float | None = None
    ) -> Any:
        limit_s = DEADLINE_S if deadline_s is None else deadline_s
        answer = await self._network.call(self._program, endpoint.server, endpoint.subject, request, limit_s)
        if isinstance(request, ListSessions):
            return SessionPage.model_construct(sessions=answer, next=None)
        if isinstance(request, ListWorkers):
            return WorkerPage.model_construct(workers=answer)
        return answer

    async def publish(self, topic: Topic[Any], token: str, message: Any, data: bytes = b"") -> None:
        self._network.on_publish(self._program, topic, message)


class KernelClock:
    """The kernel's time as a service's clock."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def monotonic(self) -> float:
        return self._kernel.now

    def wall(self) -> float:
        return self._kernel.now
