"""The platform of a worker process: models on a device, the thread that steps the engine, sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import psutil

from turboserve import logs
from turboserve.clock import Clock
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.gather import GATHER_POLICIES
from turboserve.worker.engine.models import Models
from turboserve.worker.media import EncoderSettings, FragmentEncoder
from turboserve.worker.model.weights import named_weights
from turboserve.worker.remote_decoding.ports import RolePorts
from turboserve.worker.replicas.weight_filler import WeightFiller
from turboserve.worker.sequence_parallel.peers import HostDirectory
from turboserve.worker.service.class_drivers import ClassDrivers
from turboserve.worker.service.decode_roles import without_decoding
from turboserve.worker.service.engine_commands import EngineCall, EngineCommand
from turboserve.worker.service.engine_driver import EngineDriver
from turboserve.worker.service.models import UsedFiller, choose_device, load_filled, make_engine, memory_parts
from turboserve.worker.service.packager import (
    ChunkEncoder,
    ChunkPackager,
    ClassPackager,
    FromEngine,
    ItemConverter,
    QueuedPackager,
    TensorEncoder,
    ToLoop,
)
from turboserve.worker.service.ports import (
    NO_CLASSES,
    Device,
    Loaded,
    LoadedClass,
    StartTimes,
    StoredWeights,
)
from turboserve.worker.service.warm_up import measure, switch_prompts
from turboserve.worker.settings import Settings
from turboserve.worker.transfer.interface import find_interface
from turboserve.worker.transfer.network import SocketNetwork

GONE_STATUS = 3
"""Exit status of a worker that was declared gone. The worker is started again under a new id."""
PACKAGER_LIMIT = 4
"""Largest number of items that wait for packaging, per slab: chunks and other events of the engine."""

log = logs.get("worker")
T = TypeVar("T")
NO_ENGINES: Mapping[str, Engine] = {}


class EngineThread:
    """See `ports.EngineRunner`. `deliver` is called on this thread, in order, and may block it."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[FromEngine], None],
        clock: Clock,
        quiet_s: float = 0.2,
        patience_s: float = 2.0,
        tier_report_s: float = 0.25,
        classes: Mapping[str, Engine] = NO_ENGINES,
    ) -> None:
        """`quiet_s`, `patience_s`, `tier_report_s`: see `EngineDriver`. `classes`: engines by class, the
        first of which is `engine`, where the worker serves several."""
        self.engine = engine
        intervals_s = quiet_s, patience_s, tier_report_s
        self._driver: EngineDriver | ClassDrivers
        if classes:
            policy = GATHER_POLICIES.make(engine.options.policy)
            self._driver = ClassDrivers(classes, deliver, clock.monotonic, policy, intervals_s)
        else:
            self._driver = EngineDriver(engine, deliver, clock.monotonic, *intervals_s)
        self._commands: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()
        self._stopping = False
        self.turns = 0
        self.failure: BaseException | None = None
        self.device_error_sessions: tuple[str, ...] = ()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        # The end of a stream executor's job wakes this thread at once, also when nothing else is due.
        for one in classes.values() or (engine,):
            one.when_done(lambda: self._commands.put(None))

    def start(self) -> None:
        """See `EngineRunner.start`."""
        self._thread.start()

    def submit(self, command: EngineCommand) -> None:
        """See `EngineRunner.submit`."""
        self._commands.put(command)

    def call(self, function: Callable[[Engine], T], model: str = "") -> Future[T]:
        """See `EngineRunner.call`."""
        future: Future[T] = Future()
        self._commands.put(EngineCall(function, future, model))
        return future

    def adopt(self, session: str, run: int, adopt: Callable[[Engine], None], model: str = "") -> Future[None]:
        """See `EngineRunner.adopt`."""

        def adopted(engine: Engine) -> None:
            adopt(engine)
            self._driver.has_come(session, run)

        return self.call(adopted, model)

    async def end(self, timeout_s: float) -> None:
        """See `EngineRunner.end`."""
        await asyncio.to_thread(self.stop, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """End after the current step, and wait for it at most `timeout_s`."""
        self._stopping = True
        self._commands.put(None)
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """See `EngineRunner.alive`."""
        return self._thread.is_alive()

    def _main(self) -> None:
        try:
            while not self._stopping:
                self.turns += 1
                self._take_commands()
                if not self._stopping:
                    for event in self._driver.step():
                        self._driver.stamp(event)
        except BaseException as error:
            self.failure = error
            self.device_error_sessions = self._driver.device_error_sessions(error)
            log.exception("engine thread failed")

    def _take_commands(self) -> None:
        """Carry out all queued commands. If the engine has nothing to do, wait for a command first."""
        wait_s = self._driver.idle_s()
        try:
            command = self._commands.get(timeout=wait_s) if wait_s > 0 else self._commands.get_nowait()
            while True:
                if command is not None:
                    self._driver.carry_out(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            pass


class HostPlatform:
    """See `ports.Platform`."""

    def __init__(self, settings: Settings, clock: Clock, load: Callable[[Settings], Models]) -> None:
        """Find device and transfer interface. Raises `InterfaceError` before minutes go into loading."""
        self._settings, self._clock, self._load = settings, clock, load
        self._interface = find_interface(settings.transfer_host)
        self.device = str(choose_device(settings))
        self.pid = os.getpid()
        self._import_s = max(0.0, time.time() - psutil.Process().create_time())

    async def load(self, filler: WeightFiller | None = None) -> Loaded:
        """See `Platform.load`."""
        return await asyncio.to_thread(self._loaded, filler)

    def run(
        self,
        engine: Engine,
        deliver: Callable[[ToLoop], None],
        classes: Mapping[str, LoadedClass] = NO_CLASSES,
    ) -> Device:
        """See `Platform.run`."""
        settings, clock, loop = self._settings, self._clock, asyncio.get_running_loop()

        def deliver_from_thread(item: ToLoop) -> None:
            loop.call_soon_threadsafe(deliver, item)

        engines = {name: one.engine for name, one in classes.items()}
        convert: ItemConverter = self._packager(engine)
        if classes:
            convert = ClassPackager({name: self._packager(one) for name, one in engines.items()})
        limit = PACKAGER_LIMIT * sum(one.slabs for one in engines.values() or (engine,))
        packager = QueuedPackager(convert, deliver_from_thread, limit)
        thread = EngineThread(
            engine,
            packager.put,
            clock,
            settings.migration_idle_window_s,
            settings.migration_idle_window_timeout_s,
            settings.tier_report_interval_s,
            engines,
        )
        return Device(thread, packager)

    def _packager(self, engine: Engine) -> ChunkPackager:
        return ChunkPackager(
            self.encoder(engine),
            engine.config.fps,
            self._clock,
            engine.package,
            engine.fidelity.ladder,
        )

    def encoder(self, engine: Engine) -> ChunkEncoder:
        """Create the encoder of chunks."""
        settings = self._settings
        encoder = FragmentEncoder(EncoderSettings(settings.video_crf, settings.video_preset))
        return TensorEncoder(encoder, engine.dtype)

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

    def role_ports(self) -> RolePorts:
        """See `Platform.role_ports`."""
        return RolePorts(interface=self._interface)

    def peers(self, directory: Path, worker: str) -> HostDirectory:
        """See `Platform.peers`."""
        return HostDirectory(directory, worker)

    def leave(self, reason: str) -> None:
        """See `Platform.leave`."""
        log.error("declared gone", reason=reason)
        logging.shutdown()
        os._exit(GONE_STATUS)

    def weight_network(self) -> SocketNetwork:
        """See `Platform.weight_network`."""
        settings = self._settings
        device = choose_device(settings)
        return SocketNetwork(self._interface, 0, settings.transfer_backends, device, settings.models[0])

    def _loaded_classes(self) -> Loaded:
        """Load several classes. Each gets its part of the memory and is warmed up alone."""
        began = time.monotonic()
        each = self._settings.by_class()
        models = [self._load(one) for one in each]
        weights_s = time.monotonic() - began
        classes: dict[str, LoadedClass] = {}
        parts = memory_parts(models, self._settings)
        for one, replica, part in zip(each, models, parts, strict=True):
            engine = make_engine(replica, one, part)
            switch_prompts(engine)
            classes[one.model] = LoadedClass(engine, measure(engine))
        warm_up_s = time.monotonic() - began - weights_s
        first = classes[each[0].model]
        start = StartTimes(self._import_s, weights_s, warm_up_s, models[0].weights)
        return Loaded(first.engine, first.seconds, start, classes=classes)

    def _loaded(self, filler: WeightFiller | None) -> Loaded:
        if len(self._settings.models) > 1:
            return self._loaded_classes()
        began = time.monotonic()
        used = None if filler is None else UsedFiller(filler)
        filled = None if used is None else load_filled(self._settings, used)
        models = self._load(self._settings) if filled is None else filled
        from_peers = filled is not None and used is not None and used.filled
        weights_s = time.monotonic() - began
        engine = make_engine(models, self._settings)
        switch_prompts(engine)
        with without_decoding(engine):
            seconds = measure(engine)
        warm_up_s = time.monotonic() - began - weights_s
        start = StartTimes(self._import_s, weights_s, warm_up_s, models.weights, from_peers)
        if self._settings.weights == "disk" or models.manifest is None:
            return Loaded(engine, seconds, start)
        return Loaded(engine, seconds, start, StoredWeights(models.manifest, named_weights(models.networks)))
