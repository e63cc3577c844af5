"""Run a service: logs, telemetry, health, broker, signals, supervised tasks, orderly stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import nats.errors
from pydantic import ValidationError

from turboserve import lifeline, logs, program_start, telemetry
from turboserve.bus import Bus
from turboserve.bus.canary import CanaryMonitor, canaries_of, subscribe_canaries, watch_canaries
from turboserve.bus.round_trip import INTERVAL_S, RoundTrip, measure_round_trips
from turboserve.clock import Clock, SystemClock
from turboserve.config import Settings, SettingsError
from turboserve.contracts.canaries import SpaceLevel
from turboserve.contracts.errors import UnavailableError
from turboserve.health import HealthServer
from turboserve.instruments import Instruments
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry_names import CONDITION, WARNING

log = logs.get("service")
conditions = Instruments("process").observed_gauge(
    "turboserve.process.condition",
    "{condition}",
    "1 while a condition of readiness holds, else 0: the checks of `/readyz`.",
    CONDITION,
)
warnings_given = Instruments("process").observed_gauge(
    "turboserve.process.warning",
    "{warning}",
    "1 for each warning of `/readyz` while it is given.",
    WARNING,
)

EXIT_SETTINGS = 78
"""Exit status of a process that refuses its settings (EX_CONFIG of sysexits.h). A restart does not help."""

CLOSE_S = 5.0
"""Deadline of each closer when a service stops, seconds."""

_S = TypeVar("_S", bound=Settings)


class Runtime:
    """What a service runs with: settings, bus, clock, background tasks, and checks of readiness."""

    def __init__(self, name: str, settings: Settings, bus: Bus, clock: Clock | None = None) -> None:
        """`clock` defaults to the machine's own."""
        self.name = name
        self.settings = settings
        self.bus = bus
        self.clock: Clock = SystemClock() if clock is None else clock
        self.role: Callable[[], str | None] = lambda: None
        """Returns this instance's role among several of its service, for /readyz. None: no special role."""
        self.stopping = asyncio.Event()
        self.round_trip = RoundTrip()
        """Round trips to the broker, if they are measured."""
        self._checks: dict[str, Callable[[], bool]] = {
            "broker": lambda: (
                bus.connected and self.round_trip.seconds(self.clock.monotonic()) <= settings.canary_timeout_s
            ),
            "schema_version": lambda: not bus.incompatible,
        }
        self._warnings: dict[str, Callable[[], str | None]] = {
            "broker": lambda: self.round_trip.warning(self.clock.monotonic()),
            "schema_version": lambda: "; ".join(bus.incompatible.values()) or None,
        }
        self._tasks = BackgroundTasks()
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._failed: BaseException | None = None
        self._started = False

    async def watch_streams(self) -> None:
        """Make readiness depend on the streams that this service uses: each must take appends.

        The checks are `log_chunks` and `log_events`. The warning `log_space` names a shortage of space.
        """
        streams = [log.stream for log in canaries_of(self.name)]
        monotonic = self.clock.monotonic
        monitor = CanaryMonitor(streams, self.settings.canary_timeout_s, monotonic())
        for stream in streams:
            name = f"log_{stream.lower()}"
            self.check(name, partial(_takes, monitor, stream, monotonic))
            self.warn(name, partial(_silence, monitor, stream, monotonic))
        self.warn("log_space", partial(_space, monitor))
        await subscribe_canaries(self.bus, monitor, monotonic)
        self.spawn(watch_canaries(self.bus, monitor, monotonic), "canaries")

    def check(self, name: str, condition: Callable[[], bool]) -> None:
        """Add a condition of readiness."""
        self._checks[name] = condition

    def checks(self) -> dict[str, bool]:
        return {"started": self._started, **{name: bool(test()) for name, test in self._checks.items()}}

    def warn(self, name: str, reason: Callable[[], str | None]) -> None:
        """Add a warning to /readyz. `reason` returns its text, or None. Warnings do not affect readiness.

        A warning with the name of a condition says why the condition does not hold, or may soon not hold.
        """
        self._warnings[name] = reason

    def warnings(self) -> dict[str, str]:
        return {name: reason for name, ask in self._warnings.items() if (reason := ask()) is not None}

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` until the service stops.

        If `work` raises, the process exits with status 1, and its supervisor restarts it.
        """
        task = self._tasks.create(work, name)

        def ended(done: asyncio.Task[Any]) -> None:
            if not done.cancelled() and done.exception() is not None and not self.stopping.is_set():
                self._failed = done.exception()
                log.error("task failed", task=name, exc_info=self._failed)
                self.stopping.set()

        task.add_done_callback(ended)
        return task

    def on_stop(self, close: Callable[[], Awaitable[None]]) -> None:
        """Call `close` when the service stops, in reverse order of the calls to `on_stop`."""
        self._closers.append(close)


def _takes(monitor: CanaryMonitor, stream: str, monotonic: Callable[[], float]) -> bool:
    return monitor.takes(stream, monotonic())


def _silence(monitor: CanaryMonitor, stream: str, monotonic: Callable[[], float]) -> str | None:
    now = monotonic()
    if monitor.takes(stream, now):
        return None
    silent_s = monitor.silent_s(stream, now)
    return "no append yet" if silent_s is None else f"no append for {silent_s:.1f} s"


def _space(monitor: CanaryMonitor) -> str | None:
    return None if monitor.space is SpaceLevel.ENOUGH else monitor.space.value


async def run_service(runtime: Runtime, start: Callable[[Runtime], Awaitable[None]]) -> int:
    """Run a service from its start until `runtime.stopping` is set, then close its bus.

    Returns the exit status: 1 if a task of the service failed, else 0. Raises what `start` raises.
    """
    bus = runtime.bus
    try:
        await runtime.watch_streams()
        await start(runtime)
        # A ready service receives requests, so the broker must have every subscription first.
        with suppress(nats.errors.Error):
            await bus.flush()
        runtime._started = True
        runtime.spawn(_until_closed(bus), "broker")
        log.info("ready")
        await runtime.stopping.wait()
    finally:
        runtime.stopping.set()
        log.info("stopping")
        for close in reversed(runtime._closers):
            try:
                async with asyncio.timeout(CLOSE_S):
                    await close()
            except TimeoutError as error:
                # Expected where a server does not answer, or where this process was stopped meanwhile.
                log.warning("close timed out", limit_s=CLOSE_S, error=repr(error))
            except Exception:
                log.exception("close failed")
        await runtime._tasks.stop()
        await bus.close()
    return 1 if runtime._failed else 0


async def _serve(name: str, settings: Settings, start: Callable[[Runtime], Awaitable[None]]) -> int:
    """Run the service in this process: connect to the broker, handle signals, serve health checks."""
    runtime = Runtime(name, settings, await Bus.connect(name, settings))
    conditions.add(runtime, Runtime.checks)
    warnings_given.add(runtime, lambda runtime: dict.fromkeys(runtime.warnings(), 1.0))
    monotonic = runtime.clock.monotonic
    every_s = min(INTERVAL_S, settings.broker_ping_s)
    runtime.spawn(measure_round_trips(runtime.bus, runtime.round_trip, monotonic, every_s), "round trips")
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, runtime.stopping.set)
    health = HealthServer(
        settings.health_host,
        settings.health_port,
        runtime.checks,
        lambda: runtime.role(),
        runtime.warnings,
    )
    if settings.health_port:
        await health.start()
    try:
        return await run_service(runtime, start)
    finally:
        await health.stop()


async def _until_closed(bus: Bus) -> None:
    await bus.closed.wait()
    raise UnavailableError("the connection to the broker was closed permanently")


def load(name: str, kind: type[_S]) -> _S:
    """Read the settings of service `name` from the environment.

    If a setting is invalid, log which one and why, and end the process with EXIT_SETTINGS.
    """
    try:
        return kind()
    except ValidationError as error:
        refuse(name, SettingsError.of(error).reasons)


def refuse(name: str, reasons: Iterable[str]) -> NoReturn:
    """Log why the settings of service `name` are refused, and end the process with EXIT_SETTINGS."""
    # Log with default settings, since the log settings may be the invalid ones.
    json = os.environ.get("TURBOSERVE_LOG_FORMAT") == "json"
    logs.setup(name, Settings.model_construct(log_format="json" if json else "text"))
    for reason in reasons:
        log.error("setting refused", reason=reason)
    sys.exit(EXIT_SETTINGS)


def run(name: str, settings: Settings, start: Callable[[Runtime], Awaitable[None]]) -> None:
    """Run a service until a signal, then exit with status 0, or with 1 after a failure.

    This is the body of every service's `__main__`.
    """
    logs.setup(name, settings)
    telemetry.setup(name, settings)
    lifeline.watch()
    program_start.finish()
    try:
        code = asyncio.run(_serve(name, settings, start))
    except KeyboardInterrupt:
        code = 0
    except Exception:
        log.exception("service failed")
        code = 1
    sys.exit(code)
