"""The platform of a simulated worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from turboserve.clock import Clock
from turboserve.simulation.runtime.device.apart_backend import ApartReplica
from turboserve.simulation.runtime.device.backend import DTYPE, VirtualReplica
from turboserve.simulation.runtime.device.blocking import BlockingCalls
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.decoding import DecodeThread
from turboserve.simulation.runtime.device.fabric import TransferFabric
from turboserve.simulation.runtime.device.faults import DeviceFaults
from turboserve.simulation.runtime.device.loans import VirtualPeers
from turboserve.simulation.runtime.device.network import MemoryNetwork
from turboserve.simulation.runtime.device.packager import VirtualEncoder, VirtualPackager
from turboserve.simulation.runtime.device.pages import state_size
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.device.runner import VirtualEngineRunner
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import EngineOptions
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.remote_decoding.ports import RolePorts
from turboserve.worker.replicas.weight_filler import WeightFiller
from turboserve.worker.service.host_platform import PACKAGER_LIMIT
from turboserve.worker.service.packager import ChunkPackager, ClassPackager, ItemConverter, ToLoop
from turboserve.worker.service.ports import NO_CLASSES, Device, Loaded, LoadedClass
from turboserve.worker.settings import Settings, addresses_of


@dataclass
class VirtualPlatform:
    """See `ports.Platform`."""

    profile: DeviceProfile
    settings: Settings
    clock: Clock
    fabric: TransferFabric
    host: str
    """The worker's own host name in the fabric: lower-case letters, digits and hyphens."""
    on_leave: Callable[[str], None]
    """Ends the process; it should not return."""
    pid: int = 1
    device: str = "cpu"
    faults: DeviceFaults = field(default_factory=DeviceFaults)
    profiles: Mapping[str, DeviceProfile] = field(default_factory=dict)
    """Profile of each class, the first of which is `profile`. Empty, or one: the worker serves one class."""
    _decodes: DecodeThread | None = None
    """Waits for decode workers. None: the worker has none, or is not loaded."""

    async def load(self, filler: WeightFiller | None = None) -> Loaded:
        """See `Platform.load`."""
        await asyncio.sleep(self.profile.load_s)
        self._clock = DeviceClock(self.clock)
        settings = self.settings
        if settings.roles == "denoise" or settings.text_workers:
            self._decodes = DecodeThread(asyncio.get_running_loop(), self._clock)
        if len(self.profiles) < 2:
            return Loaded(self._engine(self.profile), self.profile.chunk_s())
        # The classes' engines share the device, so they have one clock.
        classes = {name: LoadedClass(self._engine(one), one.chunk_s()) for name, one in self.profiles.items()}
        first = next(iter(classes.values()))
        return Loaded(first.engine, first.seconds, classes=classes)

    def _engine(self, profile: DeviceProfile) -> Engine:
        settings = self.settings
        apart = settings.roles == "denoise"
        options = EngineOptions(
            slab_bytes=profile.slabs * SlabLayout.of(profile.config, DTYPE).total_bytes,
            host_bytes=profile.host_states * state_size(profile),
            host_sessions=settings.host_sessions,
            max_lead_s=settings.max_lead_s,
            max_batch=profile.slabs,
            # As in production: each decode worker decodes another chunk at the same time.
            decode_batch=len(addresses_of(settings.decode_workers)) if apart else profile.decode_batch,
            decode_apart=apart,
            policy=settings.gather_policy,
            tier_alpha=settings.tier_alpha,
            fidelity=settings.fidelity,
            overlap=profile.overlaps,
        )
        loop, thread = asyncio.get_running_loop(), self._decodes
        replica = VirtualReplica(profile, self._clock, loop, self.faults)
        if thread is not None:
            replica = ApartReplica(profile, self._clock, loop, self.faults, thread)
        return Engine(replica, options, clock=self._clock, profiles=profile.stages(), ladder=profile.ladder)

    def run(
        self,
        engine: Engine,
        deliver: Callable[[ToLoop], None],
        classes: Mapping[str, LoadedClass] = NO_CLASSES,
    ) -> Device:
        """See `Platform.run`."""
        loop, settings = asyncio.get_running_loop(), self.settings
        clock, seconds = DeviceClock(self.clock), self.profile.package_s
        lends = settings.sequence_parallel_directory is not None
        engines = {name: one.engine for name, one in classes.items()}
        convert: ItemConverter = self._packager(engine, clock)
        if engines:
            convert = ClassPackager({name: self._packager(one, clock) for name, one in engines.items()})
        limit = PACKAGER_LIMIT * sum(one.slabs for one in engines.values() or (engine,))
        packager = VirtualPackager(convert, deliver, loop, clock, seconds, limit)
        runner = VirtualEngineRunner(
            engine,
            packager,
            loop,
            self._clock,
            self.faults,
            settings.migration_idle_window_s,
            settings.migration_idle_window_timeout_s,
            settings.tier_report_interval_s,
            BlockingCalls(loop, self._clock) if lends else None,
            engines,
        )
        self.runner = runner
        return Device(runner, packager)

    def _packager(self, engine: Engine, clock: DeviceClock) -> ChunkPackager:
        encoder = self.encoder(engine, clock)
        return ChunkPackager(encoder, engine.config.fps, clock, engine.package, engine.fidelity.ladder)

    def encoder(self, engine: Engine, clock: DeviceClock) -> VirtualEncoder:
        """Create the encoder of chunks."""
        return VirtualEncoder(engine.config, self.profile.package_s, clock)

    def network(self, engine: Engine) -> MemoryNetwork:
        """See `Platform.network`."""
        return MemoryNetwork(self.fabric, self.host, engine.fingerprint)

    def weight_network(self) -> MemoryNetwork:
        """See `Platform.weight_network`."""
        return MemoryNetwork(self.fabric, self.host, self.settings.models[0])

    def role_ports(self) -> RolePorts:
        """See `Platform.role_ports`."""
        assert self._decodes is not None
        network = MemoryNetwork(self.fabric, self.host, self.settings.models[0])
        return RolePorts(network.connect, self.clock.monotonic, self._decodes.wait_for)

    def peers(self, directory: Path, worker: str) -> VirtualPeers:
        """See `Platform.peers`."""
        calls = self.runner.blocking
        assert calls is not None
        return VirtualPeers(self.fabric, directory, worker, calls, self._clock)

    def leave(self, reason: str) -> None:
        """See `Platform.leave`."""
        self.on_leave(reason)
