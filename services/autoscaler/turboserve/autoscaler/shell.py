"""The autoscaler's shell: connects the pool's core to its provider, the store, load reports and clock."""

from __future__ import annotations

import asyncio

import nats.errors

from turboserve import logs, subjects
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.desk import Action
from turboserve.autoscaler.executor import Executor
from turboserve.autoscaler.messages import (
    Command,
    Event,
    Exited,
    LoadReported,
    SizeWanted,
    Tick,
)
from turboserve.autoscaler.providers.base import PoolProvider
from turboserve.autoscaler.status import pool_status
from turboserve.contracts import requests
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.pool import PoolStatus, SlotPhase
from turboserve.contracts.workers import LoadReport
from turboserve.service import Runtime
from turboserve.telemetry import meter

log = logs.get("autoscaler")
_actions = meter("autoscaler").create_counter(
    "turboserve_autoscaler_actions", description="What was done to the pool, by action."
)

TICK_S = 0.25
STATUS_S = 1.0
FAREWELL_S = 0.5
_LOUD = frozenset({"gone", "fail", "extend"})


class Shell:
    """Feeds the core one event at a time and runs its commands concurrently."""

    def __init__(self, runtime: Runtime, pool: Pool, provider: PoolProvider, grace_s: float) -> None:
        self.pool, self.provider = pool, provider
        self._runtime = runtime
        self._executor = Executor(runtime.bus, provider, grace_s)
        self._said: Action | None = None
        self._stopped = False
        self._changed = asyncio.Event()

    async def start(self, size: int) -> None:
        self.provider.watch(lambda worker, status: self.feed(Exited(worker, status)))
        await self._runtime.bus.subscribe(subjects.LOAD, "*", self._on_load)
        self.feed(SizeWanted(size if self.provider.managed else 0, "configured"))
        self._runtime.spawn(self._ticks(), "ticks")
        self._runtime.spawn(self._publish(), "status")

    def feed(self, event: Event) -> None:
        """Give the core one event and start what it asks for."""
        if self._stopped:
            return
        try:
            commands = self.pool.handle(event, self._runtime.clock.monotonic())
        except Exception as error:
            # A core that failed halfway cannot be trusted: the process ends, and the next adopts what lives.
            self._stopped = True
            self._runtime.spawn(_fail(error), "core")
            return
        self._tell()
        for command in commands:
            self._runtime.spawn(self._execute(command), type(command).__name__)

    def status(self) -> PoolStatus:
        clock = self._runtime.clock
        return pool_status(
            self.pool, self.provider.name, self.provider.managed, clock.monotonic(), clock.wall()
        )

    async def stop(self, end_workers: bool, grace_s: float) -> None:
        """Decide nothing any more; with `end_workers`, end the pool's workers and tell the store."""
        self._stopped = True
        if end_workers:
            held = [slot for slot in self.pool.slots.values() if slot.worker is not None]
            await asyncio.gather(*(self._end(slot.name, slot.worker or "", grace_s) for slot in held))
        await self.provider.close()

    async def _end(self, slot: str, worker: str, grace_s: float) -> None:
        try:
            await self.provider.release(slot, worker, grace_s)
            notice = requests.WorkerGone(worker=worker, reason="stopped with the pool")
            await self._runtime.bus.call(subjects.WORKER_GONE, notice, deadline_s=FAREWELL_S)
        except TurboServeError as error:
            # The next start finds that the process is not there, and tells the store then.
            log.info("farewell not heard", worker=worker, error=error.detail)

    async def _execute(self, command: Command) -> None:
        self.feed(await self._executor.run(command))

    async def _ticks(self) -> None:
        while True:
            self.feed(Tick())
            await asyncio.sleep(TICK_S)

    async def _on_load(self, report: LoadReport, _body: bytes) -> None:
        self.feed(LoadReported(report))

    async def _publish(self) -> None:
        while True:
            try:
                await self._runtime.bus.publish(subjects.POOL, "status", self.status())
            except (nats.errors.Error, OSError) as error:
                log.debug("status not published", error=repr(error))
            try:
                async with asyncio.timeout(STATUS_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    def _tell(self) -> None:
        """Log and count the actions since the last time."""
        new: list[Action] = []
        for action in reversed(self.pool.actions):
            if action is self._said:
                break
            new.append(action)
        for action in reversed(new):
            _actions.add(1, {"action": action.action})
            say = log.warning if action.action in _LOUD else log.info
            say(f"pool {action.action}", slot=action.slot, worker=action.worker, reason=action.reason)
            self._said = action
            self._changed.set()


async def _fail(error: Exception) -> None:
    raise error


def is_ready(pool: Pool, managed: bool) -> bool:
    """Ready: what was there is known, and every worker that is wanted has been ready or has failed once.

    A pool whose workers cannot start is a ready autoscaler with something to say, not a service that hangs.
    """
    if not pool.adopted:
        return False
    wanted = [slot for slot in pool.slots.values() if slot.wanted]
    return not managed or all(slot.phase is SlotPhase.READY or slot.failures > 0 for slot in wanted)
