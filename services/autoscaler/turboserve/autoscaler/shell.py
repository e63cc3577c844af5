"""The autoscaler's shell: connects pool and controller to provider, store, load reports and clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from itertools import takewhile
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from opentelemetry.context import Context

from turboserve import logs, subjects
from turboserve.autoscaler import metrics
from turboserve.autoscaler.command_tracker import ActionRecord
from turboserve.autoscaler.composition_solver import CompositionSolver
from turboserve.autoscaler.control_loop import ControlLoop
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.executor import Executor
from turboserve.autoscaler.messages import (
    Command,
    Event,
    Exited,
    Launch,
    LoadReported,
    SizesWanted,
    SizeWanted,
    Tick,
)
from turboserve.autoscaler.pool_start import PROVIDER_S, FoundWorkers, control_of, first_size
from turboserve.autoscaler.pool_term import UNSHARED, PoolTerm
from turboserve.autoscaler.providers.base import PoolProvider
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.status import export, forget, pool_status, scaling_status
from turboserve.autoscaler.store_link import StoreLink, WorkerUsage
from turboserve.contracts import requests
from turboserve.contracts.pool import PoolStatus
from turboserve.contracts.workers import LoadReport
from turboserve.service import Runtime
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry import tracer, within
from turboserve.telemetry_names import POOL_ACTION, WORKER

log = logs.get("autoscaler")
_trace = tracer("autoscaler")

TICK_S = 0.25
STATUS_S = 1.0
CONTROL_S = 1.0
HEALTH_S = 5.0
FINAL_REPORT_TIMEOUT_S = 0.5
_LOUD = frozenset({"gone", "fail", "extend"})


class Shell:
    """Feeds the core one event at a time and runs its commands concurrently."""

    def __init__(
        self,
        runtime: Runtime,
        pool: Pool,
        provider: PoolProvider,
        settings: AutoscalerSettings,
        term: PoolTerm = UNSHARED,
    ) -> None:
        self.pool, self.provider = pool, provider
        self._term = term
        self._runtime, self._settings = runtime, settings
        self._executor = Executor(runtime.bus, provider, settings.pool_release_grace_s, term)
        self._tasks = BackgroundTasks()
        self._subscriptions: list[Subscription] = []
        file = settings.pool_file
        usage_of = None if file is None else file.usage_of
        self._usage = WorkerUsage(settings.pool_worker_kind, settings.pool_worker_gpus, usage_of)
        self._control: ControlLoop | None = None
        self._link: StoreLink | None = None
        self._found = FoundWorkers(runtime.bus, provider)
        self._provider_error: str | None = None
        self._said: ActionRecord | None = None
        self._begun = self._stopped = False
        self._changed = asyncio.Event()
        self.on_control: Callable[[ControlLoop], None] = lambda control: None
        """Called with the control loop before it gets any event."""

    @property
    def term(self) -> int | None:
        """The term in which this process runs the pool. None: no other autoscaler shares it."""
        return self._term.number

    @property
    def control(self) -> ControlLoop | None:
        """The control loop; None until the provider has listed its workers, and for an external provider."""
        return self._control

    async def start(self) -> None:
        """Start the shell's tasks. Returns without waiting for the provider's list of workers."""
        self.provider.watch(self._exited)
        self._spawn(self._begin(), "begin")
        self._spawn(self._publish(), "status")

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        self._tasks.add(self._runtime.spawn(work, name))

    def _leads(self) -> bool:
        return self._term.leads(self._runtime.clock.monotonic())

    def _exited(self, worker: str, status: str) -> None:
        # The provider may call this in the context of the launch, which is long over.
        with within(Context()):
            self.feed(Exited(worker, status))

    async def _begin(self) -> None:
        if self.provider.managed:
            first = await self._first_size()
            solver = CompositionSolver(self._runtime.clock, self._spawn)
            self._control = control_of(self._settings, first, self.pool, self.feed, solver)
            self.on_control(self._control)
        else:
            first = SizeWanted(0, "another system starts the workers")
        self._begun = True
        bus = self._runtime.bus
        self._subscriptions.append(await bus.subscribe(subjects.LOAD, "*", self._on_load))
        self.feed(first)
        self._spawn(self._ticks(), "ticks")
        if self._control is not None:
            # Subscribe to the raw messages, so that unreadable ones are counted.
            # Live events are enough, since volatility depends only on a short recent window.
            raw = [(subjects.FEEDBACK.of(model), self._on_feedback) for model in self._settings.models]
            for subject, callback in (*raw, (subjects.EVENT.live("*"), self._on_event)):
                self._subscriptions.append(await bus.client.subscribe(subject, cb=callback))
            self._link = StoreLink(
                bus, self._runtime.clock, self.pool, self._usage, self._control, self._term
            )
            self._spawn(self._link.run(), "store")
            self._spawn(self._control_ticks(self._control), "control")
            self._spawn(self._watch_provider(), "provider")

    async def _first_size(self) -> SizeWanted | SizesWanted:
        """Wait until it is known which workers run, and return the initial size (`first_size`)."""
        await self._found.learn()
        self.pool.leaving = self._found.leaving
        return first_size(self._settings, self._found.workers, self.pool.leaving)

    def feed(self, event: Event) -> None:
        """Pass one event to the core and start the commands that it returns. Does nothing after the term."""
        if self._stopped or not self._begun or not self._leads():
            return
        now = self._runtime.clock.monotonic()
        try:
            commands = self.pool.handle(event, now)
        except Exception as error:
            # The core's state may be inconsistent now. End the process; the next one adopts the workers.
            self._stopped = True
            self._runtime.spawn(_fail(error), "core")
            return
        self._usage.look(self.pool.members.values(), now)
        self._publish_status()
        for command in commands:
            self._spawn(self._execute(command), type(command).__name__)

    def status(self) -> PoolStatus:
        now, wall = self._runtime.clock.monotonic(), self._runtime.clock.wall()
        provider, models_of = self.provider, self._settings.models_of
        status = pool_status(self.pool, provider.name, provider.managed, now, wall, models_of)
        control = self._control
        if control is None:
            found = {
                "provider_error": self._found.provider_error or self._provider_error,
                "reason": self._found.waits or status.reason,
            }
            return status.model_copy(update=found)
        return status.model_copy(
            update={
                "scaling": scaling_status(control.controller, now, wall),
                "model": control.model,
                "absorbs": control.absorbs,
                "orders": None if control.orders is None else control.orders.version,
                "provider_error": self._provider_error or self.pool.doubt,
                "reason": status.reason or (self._link.problem if self._link is not None else None),
                "start_up_s": self._usage.start_up_s,
            }
        )

    async def stop(self, end_workers: bool = False, grace_s: float = 0.0) -> None:
        """Stop deciding. With `end_workers`, also end the pool's workers and declare them gone."""
        self._stopped = True
        if end_workers:
            # Before the core has adopted the workers, those found at the start are the pool's.
            found = [] if self.pool.adopted else self._found.workers
            held = {one.worker: one.member for one in found}
            held |= {one.worker: name for name, one in self.pool.members.items() if one.worker is not None}
            await asyncio.gather(*(self._end(member, worker, grace_s) for worker, member in held.items()))
        # A command that is under way needs the provider's watch.
        await self._tasks.stop()
        await self.provider.close()
        forget()
        for subscription in self._subscriptions:
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def _end(self, member: str, worker: str, grace_s: float) -> None:
        try:
            await self.provider.release(member, worker, grace_s)
            notice = requests.WorkerGone(worker=worker, reason="stopped with the pool")
            await self._runtime.bus.call(subjects.WORKER_GONE, notice, deadline_s=FINAL_REPORT_TIMEOUT_S)
        except Exception as error:
            # The next start compares the provider's workers with the store's rows and declares these gone.
            log.info("final report not acknowledged", worker=worker, error=str(error))

    async def _execute(self, command: Command) -> None:
        if not self._leads():
            # This process was suspended after the decision: the next leader decides anew.
            return
        worker = command.worker if isinstance(command, Launch) else None
        with nullcontext() if worker is None else _trace.child("launch worker", attributes={WORKER: worker}):
            answer = await self._executor.run(command)
        self.feed(answer)

    async def _ticks(self) -> None:
        while True:
            self.feed(Tick())
            await asyncio.sleep(TICK_S)

    async def _on_load(self, report: LoadReport, _body: bytes) -> None:
        self.feed(LoadReported(report))

    async def _control_ticks(self, control: ControlLoop) -> None:
        while True:
            control.tick(self.pool.members.values(), self._runtime.clock.monotonic())
            await asyncio.sleep(CONTROL_S)

    async def _on_feedback(self, message: Msg) -> None:
        if self._control is not None:
            self._control.on_orders(message.data, self._runtime.clock.monotonic())

    async def _on_event(self, message: Msg) -> None:
        if self._control is not None:
            now, traceparent = self._runtime.clock.monotonic(), (message.headers or {}).get("traceparent")
            self._control.on_event(message.data, now, traceparent)

    async def _watch_provider(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PROVIDER_S):
                    health = await self.provider.health()
                self._provider_error = None if health.ok else health.reason or "not well"
            except Exception as error:
                self._provider_error = str(error) or f"no answer ({type(error).__name__})"
                log.info("provider health unknown", error=repr(error))
            await asyncio.sleep(HEALTH_S)

    async def _publish(self) -> None:
        while True:
            # After the term, the next leader's status is the pool's.
            if self._leads():
                await self._publish_once()
            try:
                async with asyncio.timeout(STATUS_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
            self._changed.clear()

    async def _publish_once(self) -> None:
        status, control = self.status(), self._control
        feedback = None if control is None else control.controller.advisor.feedback_monitor.feedback
        export(status, feedback, self._usage.gpus, 0 if control is None else control.maximum)
        with suppress(nats.errors.Error, OSError):
            await self._runtime.bus.publish(subjects.POOL, self.pool.name, status)

    def _publish_status(self) -> None:
        """Log and count the actions since the last call, and publish the status if there are any."""
        new = takewhile(lambda action: action is not self._said, reversed(self.pool.actions))
        for action in reversed(list(new)):
            metrics.actions.add(1, {POOL_ACTION: action.action})
            say = log.warning if action.action in _LOUD else log.info
            say(f"pool {action.action}", member=action.member, worker=action.worker, reason=action.reason)
            self._said = action
            self._changed.set()


async def _fail(error: Exception) -> None:
    raise error
