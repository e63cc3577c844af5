"""A worker on a virtual device, with the accessors that the checks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, cast

from torch import Tensor

from turboserve.service import Runtime
from turboserve.simulation.faults import Faults
from turboserve.simulation.runtime.device.backend import VirtualBackend
from turboserve.simulation.runtime.device.contents import number_of
from turboserve.simulation.runtime.device.fabric import TransferFabric
from turboserve.simulation.runtime.device.platform import VirtualPlatform
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.device.work import VirtualChunk, VirtualPass
from turboserve.simulation.service import ServiceProcess
from turboserve.worker.engine.activity import HostState, Offloaded, Transferring
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.residency_controller import ResidencyCounts
from turboserve.worker.engine.session import Session
from turboserve.worker.engine.snapshot import Snapshot
from turboserve.worker.engine.state_transfer import TransferPurpose
from turboserve.worker.engine.work import Work
from turboserve.worker.service import app
from turboserve.worker.service.worker import Worker
from turboserve.worker.settings import Settings


@dataclass(frozen=True)
class HeldState:
    """A session's state as a worker holds it."""

    next_chunk: int
    number: int
    """Number of the state; see `device.contents`."""
    on_host: bool
    """Whether the session is suspended."""


class WorkerHost(Protocol):
    """The deployment as its workers use it."""

    fabric: TransferFabric
    faults: Faults
    fault_random: Random


class VirtualWorker:
    """One worker's platform; its process runs the worker's own composition."""

    def __init__(
        self,
        host: WorkerHost,
        name: str,
        profiles: Mapping[str, DeviceProfile],
        begins_chunk: Callable[[str, str, str], None],
    ) -> None:
        """`profiles`: by class. `begins_chunk(worker, session, class of the engine)` is called before each
        forward."""
        self.name, self.profiles = name, profiles
        self.profile = next(iter(profiles.values()))
        """That of the first class."""
        self.service: ServiceProcess | None = None
        self.worker: Worker | None = None
        """None while the worker loads its model."""
        self.slowdown = 1.0
        """How many times longer than declared its device computes from the start on."""
        self.lends: Callable[[VirtualWorker, Engine, VirtualBackend], None] = lambda *given: None
        """Called with each engine before it computes."""
        self._host, self._begins_chunk = host, begins_chunk
        self._platform: VirtualPlatform | None = None

    async def start(self, service: ServiceProcess, runtime: Runtime) -> None:
        """Run what the worker's process runs."""
        settings = service.settings
        assert isinstance(settings, Settings)
        platform = VirtualPlatform(
            self.profile,
            settings,
            runtime.clock,
            self._host.fabric,
            self.name.replace("_", "-"),
            self._leave,
        )
        if len(self.profiles) > 1:
            platform.profiles = self.profiles
        platform.faults.slowdown = self.slowdown
        platform.faults.host_full = platform.faults.offload_fails = self._host_full
        self._platform = platform
        self.worker = await app.compose(runtime, settings, platform)
        for model, engine in zip(self.profiles, self._engines, strict=True):
            self._observe(model, engine)

    def _observe(self, model: str, engine: Engine) -> None:
        forward = engine.backend.forward

        def observed(works: Sequence[Work]) -> list[Tensor]:
            for work in works:
                session = cast(VirtualChunk | VirtualPass, work).session
                self._begins_chunk(self.name, session, model)
            return forward(works)

        engine.backend.forward = observed  # type: ignore[method-assign]
        if isinstance(engine.backend, VirtualBackend):
            self.lends(self, engine, engine.backend)

    @property
    def _engines(self) -> tuple[Engine, ...]:
        return () if self.worker is None else self.worker.classes.engines

    def state(self, session: str) -> HeldState | None:
        """Return the session's state on this worker; None if the worker does not hold it."""
        engine = next((one for one in self._engines if one.knows(session)), None)
        if engine is None:
            return None
        active = engine.sessions.get(session)
        if active is None:
            return _held(engine.snapshot(session), on_host=True)
        kept = _kept(active)
        if kept is not None:
            return _held(kept, on_host=False)
        return HeldState(active.state.next_chunk, number_of(active), False)

    @property
    def copies(self) -> tuple[str, ...]:
        """Sessions whose states it sends to other workers."""
        return () if self.worker is None else tuple(self.worker.migrations.source._open)

    @property
    def loans(self) -> int:
        """Number of loans that it has begun as home since its model is loaded."""
        if self.worker is None:
            return 0
        backends = (engine.backend for engine in self._engines)
        return sum(one.parallel.begun for one in backends if isinstance(one, VirtualBackend))

    @property
    def residency(self) -> ResidencyCounts:
        """Numbers of sessions that left their slabs for others and came back since its model is loaded."""
        counts = [engine.residency.counts for engine in self._engines]
        return ResidencyCounts(
            sum(one.offloads for one in counts),
            sum(one.returns for one in counts),
            sum(one.late_returns for one in counts),
        )

    def held(self) -> dict[str, int]:
        """Count the memory and entries in use, by kind."""
        if self.worker is None:
            return {}
        engines, table = self._engines, self.worker.table
        return {
            "slabs": sum(engine.slabs - engine.free_slabs for engine in engines),
            "host bytes": sum(engine.host_bytes_used for engine in engines),
            "cell bytes": sum(engine.offloaded_bytes for engine in engines),
            "reserved places": sum(engine._table._reserved for engine in engines),
            "sessions": len(table.entries),
            "chunks": table.unpublished,
            "copies": len(self.copies),
        }

    def slow_down(self, factor: float) -> None:
        """Let what the device computes take `factor` times its declared time from now on."""
        if self._platform is not None:
            self._platform.faults.slowdown = factor

    def lose_device(self) -> None:
        """Make every use of the device fail."""
        if self._platform is not None:
            self._platform.faults.lost = True

    def repair_device(self) -> None:
        """Repair the device, unless its loss has already ended the worker."""
        if self._platform is not None and (self.worker is None or self.worker.alive):
            self._platform.faults.lost = False

    @property
    def device_lost(self) -> bool:
        """Whether the device is lost, or was lost and has failed the worker before its repair."""
        return self._platform is not None and (self._platform.faults.lost or self._platform.faults.failed)

    @property
    def weights(self) -> Mapping[str, str]:
        """Weights of its models, by class."""
        return {model: profile.weights for model, profile in self.profiles.items()}

    def _leave(self, reason: str) -> None:
        assert self.service is not None
        self.service.kill(f"declared gone: {reason}")

    def _host_full(self) -> bool:
        return self._host.fault_random.random() < self._host.faults.host_full

    @property
    def alive(self) -> bool:
        return self.service is not None and self.service.alive

    @property
    def generating(self) -> bool:
        """Whether the worker's engine would begin a step now, by the worker's own view."""
        if self._platform is None or self.worker is None or not self.alive:
            return False
        return self._platform.runner.generating


def _kept(active: Session) -> Snapshot | None:
    """Return the state of an active session that is in host memory; None if the session has its slab, or has
    not begun."""
    match active.activity:
        case Offloaded(state=HostState(snapshot=snapshot)):
            return snapshot
        case Offloaded(arrived=snapshot):
            return snapshot
        case Transferring(transfer=transfer) if transfer.purpose is TransferPurpose.STORAGE:
            return transfer.snapshot
        case _:
            return None


def _held(snapshot: Snapshot, *, on_host: bool) -> HeldState:
    return HeldState(snapshot.next_chunk, _number(snapshot.tensors["numbers"]), on_host)


def _number(page: Tensor) -> int:
    """Return the first of the packed numbers; see `device.pages`."""
    return int.from_bytes(bytes(page[:8].tolist()), "little", signed=True)
