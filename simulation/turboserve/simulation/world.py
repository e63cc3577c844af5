"""One simulated deployment: the services' processes, their servers, users, faults, and the checks."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any

from turboserve.autoscaler import app as autoscaler
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.autoscaler.shell import Shell as AutoscalerShell
from turboserve.bus import Bus
from turboserve.contracts.workers import WorkerPhase
from turboserve.gateway.app import start_gateway
from turboserve.gateway.context import Gateway
from turboserve.scheduler import app as scheduler
from turboserve.scheduler.app import Lead
from turboserve.scheduler.core import Scheduler
from turboserve.scheduler.settings import SchedulerSettings
from turboserve.service import Runtime
from turboserve.simulation import observe
from turboserve.simulation.faults import CALM, Faults
from turboserve.simulation.invariants import Checker
from turboserve.simulation.provider import Machines, SimulatedProvider
from turboserve.simulation.role_workers import RoleWorker
from turboserve.simulation.runtime.broker import FaultyNetwork, MemoryClient, Network
from turboserve.simulation.runtime.hot import MemoryHotStore
from turboserve.simulation.runtime.process import current
from turboserve.simulation.runtime.rows.database import MemoryDatabase
from turboserve.simulation.servers import Servers
from turboserve.simulation.service import ServiceProcess
from turboserve.simulation.settings import Scale
from turboserve.simulation.trace import EventTrace
from turboserve.simulation.virtual_worker import VirtualWorker
from turboserve.state_store.composition import compose
from turboserve.subjects import CHUNKS
from turboserve.worker.settings import Settings as WorkerSettings

RESTART_S = (0.1, 2.0)
"""Bounds of the time between the end of a service's process and the next start, in seconds."""
START_S = (0.5, 2.0)
"""Bounds of the time for which a worker loads its model, in seconds."""
LOOK_S = 0.25
"""Interval at which the broker looks for silent clients, in seconds."""


class World(Servers):
    """One deployment. `FaultInjector` injects faults, `Users` use the services, `Checker` checks."""

    def __init__(
        self,
        seed: int,
        faults: Faults,
        scale: Scale,
        keep_lines: bool = False,
        network: Network | None = None,
    ) -> None:
        """Without `network`, messages have the delays and losses of `faults`."""
        self.seed, self.faults, self.scale = seed, faults, scale
        super().__init__(seed, faults, network)
        self._context = Context()
        self.random = random.Random(f"world {seed}")
        """Random choices of users, processes and the provider."""
        self.fault_random = random.Random(f"faults {seed}")
        self.trace = EventTrace(self.loop, keep_lines)
        self.checker = Checker(self)
        self.checker.tenants.equal_clocks = faults.skew_s == 0.0
        self.broker.on_message = self.trace.result
        self.broker.jetstream.on_append = self.checker.log.appended
        self.postgres.on_commit = self.checker.committed
        self.postgres.on_lost = self.checker.lost
        self.loop.set_exception_handler(self._callback_failed)
        self.capacity: dict[str, int] = {}
        """Worker → its slots, K."""
        self.workers: dict[str, VirtualWorker] = {}
        self.outside: dict[str, int] = {}
        """Worker outside the pool → its position in `SessionClasses.outside`."""
        self.role_workers: dict[str, RoleWorker] = {}
        """Decode workers and text workers, by name."""
        self.weights = 1
        """Number of the checkpoint that workers load from now on."""
        self.machines = Machines(self._launch)
        self._services: dict[str, ServiceProcess] = {}
        """The newest process of each service, by name."""
        self._gateways: dict[ServiceProcess, Gateway] = {}
        self._leads: dict[ServiceProcess, Lead] = {}
        self.autoscaler: AutoscalerShell | None = None
        """Shell of the autoscaler that began last."""
        self.restarts = True
        """Whether ended services are started again."""
        self.made_when_calm: dict[str, int] = {}
        """Session → chunks in the log when the faults stopped."""
        self._clients: dict[ServiceProcess, MemoryClient] = {}
        self._incarnations: dict[str, int] = {}
        """Number of processes that each service has had."""
        self.on_begin: Callable[[ServiceProcess], None] = lambda service: None
        """Called with each process that starts."""
        self.on_lent: Callable[[ServiceProcess, ServiceProcess, float], None] = lambda donor, home, seconds: (
            None
        )
        """Called when a donor begins to compute a forward with a home, which takes about so many seconds."""
        self.core_of: Callable[[SchedulerSettings], Scheduler] = scheduler.core_of
        """Builds each scheduler's core: as the product does, unless a caller has other policies."""
        self.on_scheduler: Callable[[Scheduler, SchedulerSettings], Scheduler] = lambda core, settings: core
        """Called with each scheduler's core. Returns the core to run."""
        self.on_autoscaler: Callable[[AutoscalerShell, AutoscalerSettings], None] = lambda shell, settings: (
            None
        )
        """Called with each autoscaler before any of its tasks runs."""
        self.kills = 0
        """Number of processes that faults have killed."""

    def _callback_failed(self, _loop: object, context: dict[str, Any]) -> None:
        """Report a callback that raised.

        Reports of unretrieved exceptions are ignored: their time depends on Python's collector, not on the
        seed.
        """
        if "handle" in context:
            process = current()
            name = "the world" if process is None else process.name
            self.checker.fail("no_core_fails", f"{name}: {context['message']}: {context.get('exception')!r}")

    def fail(self, invariant: str, message: str) -> None:
        """Report a violation."""
        self.checker.fail(invariant, message)

    def begin(self) -> None:
        """Start all services."""
        scale = self.scale
        for kind, count in (
            ("state-store", scale.stores),
            ("scheduler", scale.schedulers),
            ("autoscaler", scale.autoscalers),
            ("gateway", scale.gateways),
        ):
            for number in range(1, count + 1):
                self._start(f"{kind}-{number}", kind)
        for place in () if scale.roles is None else scale.roles.places:
            self._start_role_worker(place)
        if scale.classes is not None:
            for number in range(len(scale.classes.outside)):
                self._start_outside(number)
        if scale.client_silence_s is not None:
            self._drop_silent_clients(scale.client_silence_s)

    def later(self, seconds: float, action: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call `action` after `seconds`, in no process."""
        return self.loop.call_later(seconds, action, *args, context=self._context)

    def _drop_silent_clients(self, silence_s: float) -> None:
        self.broker.drop_silent(silence_s)
        self.later(LOOK_S, self._drop_silent_clients, silence_s)

    # Services

    def _start(self, name: str, kind: str) -> None:
        starts: dict[str, Callable[[ServiceProcess, Runtime], Awaitable[None]]] = {
            "state-store": self._state_store,
            "scheduler": self._scheduler,
            "autoscaler": self._autoscaler,
            "gateway": self._gateway,
        }
        settings = getattr(self.scale, "store" if kind == "state-store" else kind)()
        life = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        service = ServiceProcess(self, name, kind, settings, starts[kind], self._skew(), life)
        self._services[name] = service
        self._begin(service)

    def _begin(self, service: ServiceProcess) -> None:
        service.begin()
        self.on_begin(service)

    def _skew(self) -> float:
        return self.random.uniform(-self.faults.skew_s, self.faults.skew_s)

    async def _state_store(self, service: ServiceProcess, runtime: Runtime) -> None:
        settings = self.scale.store()
        database = MemoryDatabase(self.postgres, deadline_s=settings.transaction_deadline_s)
        await compose(runtime, settings, database, MemoryHotStore(self.hot))

    async def _scheduler(self, service: ServiceProcess, runtime: Runtime) -> None:
        def core(settings: SchedulerSettings) -> Scheduler:
            core = observe.scheduler(self.core_of(settings), service.process.name, self.checker)
            return self.on_scheduler(core, settings)

        self._leads[service] = await scheduler.start(runtime, self.scale.scheduler(), core)

    async def _autoscaler(self, service: ServiceProcess, runtime: Runtime) -> None:
        settings = self.scale.autoscaler()

        def begins(shell: AutoscalerShell) -> None:
            self.autoscaler = shell
            observe.autoscaler(shell, service.process.name, self.checker)
            self.on_autoscaler(shell, settings)

        await autoscaler.start(runtime, settings, lambda: SimulatedProvider(self), begins)

    async def _gateway(self, service: ServiceProcess, runtime: Runtime) -> None:
        gateway = await start_gateway(runtime, self.scale.gateway())
        runtime.on_stop(gateway.streams.close)
        self._gateways[service] = gateway

    async def connect(self, service: ServiceProcess) -> Bus:
        """Connect the service's bus. Runs in the service's process."""

        async def connect(servers: object = None, **options: Any) -> MemoryClient:
            client = self._clients[service] = await self.broker.connect(servers, **options)
            return client

        return await Bus.connect(service.kind, service.settings, connect)

    def ended(self, service: ServiceProcess, why: str) -> None:
        """Handle the end of a process. A service is started again; only the autoscaler replaces a worker."""
        self._gateways.pop(service, None)
        self._leads.pop(service, None)
        self._clients.pop(service, None)
        if service.kind == "worker" and service.name not in self.outside:
            self.machines.exited(service.name, why, self.loop)
            return
        if not self.restarts:
            return
        delay_s = self.random.uniform(*RESTART_S)
        if service.kind == "worker":
            self.later(delay_s, self._start_outside, self.outside[service.name])
            return
        if (role := self.role_workers.get(service.name)) is not None:
            self.later(delay_s, self._start_role_worker, role.place)
            return
        self.later(delay_s, self._start, service.name, service.kind)

    # Workers

    def _launch(self, slot: str, name: str) -> ServiceProcess:
        return self._launch_worker(name, self.scale.worker(name, slot))

    def _start_outside(self, number: int) -> None:
        """Start a worker outside the pool. As a new process, it has a new id."""
        assert self.scale.classes is not None
        place = f"outside-{number}"
        life = self._incarnations[place] = self._incarnations.get(place, 0) + 1
        name = f"wx{number}_{life}"
        self.outside[name] = number
        settings = self.scale.outside(name, self.scale.classes.outside[number])
        self._services[place] = self._launch_worker(name, settings)

    def _start_role_worker(self, place: str) -> None:
        """Start a decode worker or text worker. As a new process, it has a new id and the same address."""
        roles = self.scale.roles
        assert roles is not None
        kind, model = roles.places[place].kind, roles.places[place].model
        life = self._incarnations[place] = self._incarnations.get(place, 0) + 1
        name = f"{place.replace('-', '')}_{life}"
        load_s = self.random.uniform(*START_S)
        profile = self.scale.profiles(load_s, (model,), self.weights)[model]
        worker = self.role_workers[name] = RoleWorker(place, kind, roles, profile, self.fabric)
        settings = self.scale.role_worker(name, kind, model)
        service = ServiceProcess(self, name, kind, settings, worker.start, self._skew())
        self._services[place] = service
        self._begin(service)

    def living_role_workers(self) -> list[ServiceProcess]:
        """Return the processes of decode workers and text workers that live."""
        places = () if self.scale.roles is None else self.scale.roles.places
        return [self._services[place] for place in places if self._services[place].alive]

    def _launch_worker(self, name: str, settings: WorkerSettings) -> ServiceProcess:
        faults, chance = self.faults, self.random
        load_s = chance.uniform(*START_S)
        # Nothing replaces a worker outside the pool that loads for ever.
        if chance.random() < faults.never_ready and name not in self.outside:
            load_s = math.inf
        profiles = self.scale.profiles(load_s, settings.models, self.weights)
        worker = VirtualWorker(self, name, profiles, self.checker.begins_chunk)
        worker.lends, worker.slowdown = self.checker.loans.lends, self.scale.slowdown(settings.pool_member)
        service = ServiceProcess(self, name, "worker", settings, worker.start, self._skew())
        worker.service = service
        if chance.random() < faults.crash_at_start:
            self.later(0.1, service.kill, "cannot start")
        self.workers[name] = worker
        self.capacity[name] = self.scale.slots
        self._begin(service)
        return service

    def worker(self, name: str | None) -> VirtualWorker | None:
        """Return the worker of this id, if its process lives."""
        worker = self.workers.get(str(name))
        return worker if worker is not None and worker.alive else None

    # Faults

    def mute(self, service: ServiceProcess, seconds: float) -> None:
        """Drop the acknowledgements of the service's appends, which still arrive."""
        client = self._clients.get(service)
        if client is not None and isinstance(self.network, FaultyNetwork):
            self.network.mute(client, self.loop.time() + seconds)

    def lose_device(self, service: ServiceProcess) -> None:
        """Make every use of the worker's device fail from now on."""
        self.trace.note("device lost", service.name)
        if (role := self.role_workers.get(service.name)) is not None:
            role.faults.lost = True
        else:
            self.workers[service.name].lose_device()

    def isolate(self, service: ServiceProcess, seconds: float) -> None:
        """Let the connections between the worker and others carry nothing for a while."""
        role = self.role_workers.get(service.name)
        name = service.name.replace("_", "-") if role is None else role.place
        until = self.loop.time() + seconds
        self.fabric.cut_until[name] = max(self.fabric.cut_until.get(name, 0.0), until)

    def change_weights(self) -> None:
        """Make workers that start from now on load another checkpoint."""
        self.weights += 1
        self.trace.note("checkpoint", self.weights)

    def restart_broker(self) -> None:
        """Restart the broker on another disk, without its streams."""
        self.trace.note("streams are lost")
        self.checker.log.streams_lost()
        self.broker.start(lost_streams=True)

    def restart_broker_without_tail(self, written_until: float) -> None:
        """Restart the broker without what it stored after `written_until`, loop time."""
        self.trace.note("the streams end", f"{written_until:.3f}")
        self.broker.start(written_until=written_until)
        self.checker.log.tail_lost(self.broker.jetstream.streams.get(CHUNKS))

    def repair(self) -> None:
        """Repair servers and network. Frozen processes resume when their freeze ends."""
        self.trace.note("faults stop")
        self.faults = CALM
        for worker in self.workers.values():
            worker.repair_device()
        for role in self.role_workers.values():
            role.faults.slowdown = 1.0
            role.faults.lost = role.faults.failed
        self.fabric.cut_until.clear()
        super().repair()

    # Looking

    def service(self, name: str) -> ServiceProcess:
        """Return the newest process of a service."""
        return self._services[name]

    def gateways(self) -> list[tuple[ServiceProcess, Gateway]]:
        """Return the gateways that serve, each with its process."""
        return list(self._gateways.items())

    def running(self) -> list[ServiceProcess]:
        """Return the processes that live."""
        machines = [machine.worker for machine in self.machines.living()]
        return [service for service in (*self._services.values(), *machines) if service.alive]

    def leaders(self) -> list[str]:
        """Return the names of the schedulers that may decide now."""
        return [service.name for service, lead in self._leads.items() if lead.role == "leader"]

    def most_slots(self, ending: int = 0) -> int:
        """Return the slots of the pool at its largest, or of all workers not known to be gone, if more.

        `ending`: workers that are gone and count all the same.
        """
        workers = self.postgres.tables.workers.rows.values()
        known = sum(entry.record.phase is not WorkerPhase.GONE for entry in workers)
        return max(known + ending, self.scale.most_workers) * self.scale.admitted_sessions

    def free_slots(self, *, absorbing: bool = False) -> int:
        """Count the free slots of living workers that accept sessions. `absorbing`: up to K_floor of each."""
        return sum(
            max(
                0,
                (entry.record.most_sessions if absorbing else entry.record.capacity) - self.slots_used(name),
            )
            for name, entry in self.postgres.tables.workers.rows.items()
            if entry.record.phase is WorkerPhase.READY and self.worker(name) is not None
        )

    def mark_calm(self) -> None:
        """Record how many chunks each session has when the faults stop."""
        self.restarts = True
        self.made_when_calm = {
            session: 0 if log.last is None else log.last.index + 1
            for session, log in self.checker.log.sessions.items()
        }

    def counts(self) -> dict[str, int]:
        """Count what took place in this run."""
        return {
            "sessions": len(self.postgres.tables.sessions.rows),
            "chunks": self.checker.log.chunks,
            "lowered": self.checker.log.lowered,
            "absorbed": self.checker.decisions.absorbed,
            "rescues": self.checker.decisions.rescues,
            "by_quota": self.checker.decisions.by_quota,
            "placements": self.checker.placements,
            "moves": self.checker.migrations,
            "loans": sum(worker.loans for worker in self.workers.values()),
            "lent_forwards": self.checker.loans.forwards,
            "broken_forwards": self.checker.loans.broken,
            "lent_beside_own": self.checker.loans.beside_own,
            "offloads": sum(worker.residency.offloads for worker in self.workers.values()),
            "returns": sum(worker.residency.returns for worker in self.workers.values()),
            "late_returns": sum(worker.residency.late_returns for worker in self.workers.values()),
            "decoded": sum(r.decodes.decoded for r in self.role_workers.values() if r.decodes is not None),
            "encoded": sum(r.encodes.encoded for r in self.role_workers.values() if r.encodes is not None),
            "workers": len(self.workers),
            "kills": self.kills,
        }

    def close(self) -> None:
        """End every process."""
        self.loop.close()
