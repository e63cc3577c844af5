"""Decode workers and text workers on virtual devices: processes of the services' own servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from turboserve.service import Runtime
from turboserve.simulation.roles import DECODE, RoleScale
from turboserve.simulation.runtime.device.clock import DeviceClock
from turboserve.simulation.runtime.device.decoding import (
    VirtualDecoder,
    VirtualTextEncoder,
    packed_config,
)
from turboserve.simulation.runtime.device.fabric import TransferFabric
from turboserve.simulation.runtime.device.faults import DeviceFaults
from turboserve.simulation.runtime.device.network import MemoryNetwork
from turboserve.simulation.runtime.device.profile import DeviceProfile
from turboserve.simulation.runtime.threads import TimedThread
from turboserve.simulation.service import ServiceProcess
from turboserve.worker.engine.gather import LatencyProfile
from turboserve.worker.engine.snapshot import state_fingerprint
from turboserve.worker.engine.streams import DEVICE_LOST
from turboserve.worker.remote_decoding.server import DecodeServer
from turboserve.worker.remote_decoding.text_server import TextServer
from turboserve.worker.service.decode_roles import LoadedDecoder, serve_decoder
from turboserve.worker.service.text_roles import serve_encoder
from turboserve.worker.settings import Settings
from turboserve.worker.transfer.channel import ByteReader, ByteWriter
from turboserve.worker.transfer.network import Serve

CPU = torch.device("cpu")


class RoleWorker:
    """One process of a decode worker or a text worker."""

    def __init__(
        self, place: str, kind: str, scale: RoleScale, profile: DeviceProfile, fabric: TransferFabric
    ) -> None:
        """`place`: name by which others reach it. `profile`: of the workers that ask it."""
        self.place, self.faults = place, DeviceFaults()
        self.decodes: DecodeServer | None = None
        self.encodes: TextServer | None = None
        self._kind, self._scale, self._profile, self._fabric = kind, scale, profile, fabric

    async def start(self, service: ServiceProcess, runtime: Runtime) -> None:
        """Run what the process of such a worker runs, without its models."""
        settings, profile, name = service.settings, self._profile, service.name
        assert isinstance(settings, Settings)
        await asyncio.sleep(profile.load_s)
        clock = DeviceClock(runtime.clock)
        thread, fingerprint = TimedThread(clock), state_fingerprint(profile.config, profile.weights)

        def compute(seconds: float) -> None:
            if self.faults.lost:
                self.faults.failed = True
                raise DEVICE_LOST[0]("the virtual device is lost")
            clock.advance(seconds * self.faults.slowdown)

        if self._kind == DECODE:
            config = packed_config(profile.config)
            decoder = VirtualDecoder(config, self._scale.chunk_s, compute)
            loaded = LoadedDecoder(
                decoder, config, fingerprint, CPU, self._scale.room, {1: self._scale.chunk_s}
            )
            self.decodes = await serve_decoder(runtime, settings, loaded, name, self._listen, thread, clock)
            return
        encoder = VirtualTextEncoder(profile.config, LatencyProfile(profile.text_s), compute)
        self.encodes = await serve_encoder(
            runtime, settings, encoder, fingerprint, name, self._listen, thread
        )

    async def _listen(self, serve: Serve) -> tuple[str, Callable[[], None]]:
        async def served(reader: ByteReader, writer: ByteWriter) -> None:
            try:
                await serve(reader, writer)
            finally:
                # As the kernel does at the end of a process.
                writer.close()

        network = MemoryNetwork(self._fabric, self.place, self._profile.weights)
        return await network.listen(served), network.close
