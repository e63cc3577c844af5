"""The platform of a worker process: models on a device, threads, sockets."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from turboserve import logs
from turboserve.clock import Clock
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.tensor_backend import Models
from turboserve.worker.media import EncoderSettings, FragmentEncoder
from turboserve.worker.service.engine_thread import EngineThread
from turboserve.worker.service.models import choose_device, make_engine
from turboserve.worker.service.packaged_chunks import ToLoop
from turboserve.worker.service.packager import ChunkPackager, QueuedPackager, TensorEncoder
from turboserve.worker.service.ports import Device, Loaded
from turboserve.worker.service.warm_up import measure, switch_prompts
from turboserve.worker.settings import Settings
from turboserve.worker.transfer.interface import find_interface
from turboserve.worker.transfer.network import SocketNetwork

GONE_STATUS = 3
"""Exit status of a worker that was declared gone. The worker is started again under a new id."""
PACKAGER_LIMIT = 4
"""Largest number of items that wait for packaging, per slab: chunks and other events of the engine."""

log = logs.get("worker")


class HostPlatform:
    """See `ports.Platform`."""

    def __init__(self, settings: Settings, clock: Clock, load: Callable[[Settings], Models]) -> None:
        """Find device and transfer interface. Raises `InterfaceError` before minutes go into loading."""
        self._settings, self._clock, self._load = settings, clock, load
        self._interface = find_interface(settings.transfer_host)
        self.device = str(choose_device(settings))
        self.pid = os.getpid()

    async def load(self) -> Loaded:
        """See `Platform.load`."""
        return await asyncio.to_thread(self._loaded)

    def run(self, engine: Engine, deliver: Callable[[ToLoop], None]) -> Device:
        """See `Platform.run`."""
        settings, clock, loop = self._settings, self._clock, asyncio.get_running_loop()

        def deliver_from_thread(item: ToLoop) -> None:
            loop.call_soon_threadsafe(deliver, item)

        encoder = FragmentEncoder(EncoderSettings(settings.video_crf, settings.video_preset))
        convert = ChunkPackager(
            TensorEncoder(encoder, engine.dtype), engine.config.fps, clock, engine.package
        )
        packager = QueuedPackager(convert, deliver_from_thread, limit=PACKAGER_LIMIT * engine.slots)
        thread = EngineThread(
            engine,
            packager.put,
            clock,
            settings.migration_idle_window_s,
            settings.migration_idle_window_timeout_s,
        )
        return Device(thread, packager)

    def network(self, engine: Engine) -> SocketNetwork:
        """See `Platform.network`."""
        settings = self._settings
        return SocketNetwork(
            self._interface,
            settings.transfer_port,
            settings.transfer_backends,
            engine.device,
            engine.fingerprint,
        )

    def leave(self, reason: str) -> None:
        """See `Platform.leave`."""
        log.error("declared gone", reason=reason)
        logging.shutdown()
        os._exit(GONE_STATUS)

    def _loaded(self) -> Loaded:
        engine = make_engine(self._load(self._settings), self._settings)
        switch_prompts(engine)
        return Loaded(engine, measure(engine))
