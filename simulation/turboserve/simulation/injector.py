"""Injects faults at the rates of a run, and repairs servers, connections and frozen processes."""

from __future__ import annotations

from collections.abc import Callable

from turboserve.simulation.runtime.broker.jetstream import Storage
from turboserve.simulation.runtime.process import Process
from turboserve.simulation.service import ServiceProcess
from turboserve.simulation.world import World

BEAT_S = 0.5
LONGEST_FREEZE_S = 12.0
LONGEST_CUT_S = 14.0
LONGEST_MUTE_S = 40.0
SLOW = (3.0, 30.0)
"""Choices for the factor by which a device is slow."""
LONGEST_SERVER_S = 6.0
"""Maximum time for which a server is frozen, slow or full."""
LONGEST_UNWRITTEN_S = 6.0
"""Maximum time for which a broker that loses power had written nothing to its disk."""
STUTTERS = 4
"""Number of pauses of a home that stutters within a forward of two workers."""
PAUSE_SHARE = 0.9
"""Length of each pause, as a share of the longest time of an exchange."""
BETWEEN_S = 0.01
"""Time between two pauses, seconds."""
REPLACED_S = (0.5, 12.0)
"""Bounds of the time between a change of the weights and the stop of a worker, in seconds."""

Action = Callable[[], None]


class FaultInjector:
    """Draws, every `BEAT_S`, which faults occur before the next draw, and when."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stopped = False
        self._unwritten_since = 0.0
        """Loop time from which on the stopped broker has written nothing to its disk."""
        faults = world.faults
        self._steps = {kind: rate for kind, rate in faults.crash_step.items() if rate > 0.0}
        self._crashing: dict[Process, tuple[ServiceProcess, float]] = {}
        if self._steps:
            world.loop.before_callback = self._before_callback
        world.on_begin = self._began
        world.on_lent = self._lent
        self._later(BEAT_S, self._beat)

    def _began(self, service: ServiceProcess) -> None:
        """Register a process that was started."""
        rate = self._steps.get(service.kind)
        if rate is not None and not self._stopped:
            self._crashing[service.process] = (service, rate)

    def stop(self) -> None:
        """End all faults.

        Servers and connections are repaired; frozen processes continue when their freeze ends.
        """
        self._stopped = True
        self._world.loop.before_callback = None
        self._world.repair()

    def _lent(self, donor: ServiceProcess, home: ServiceProcess, seconds: float) -> None:
        """Perhaps break the forward that a donor begins to compute with a home, which takes about so long."""
        world, chance, faults = self._world, self._world.fault_random, self._world.faults
        if self._stopped or max(faults.loan_breaks, faults.loan_stutters) <= 0.0:
            return
        if chance.random() < faults.loan_breaks:
            hit, dies = chance.choice((donor, home)), chance.random() < 0.5
            action = (
                (lambda: self._kill(hit, "killed within a forward")) if dies else lambda: self._freeze(hit)
            )
            self._later(chance.uniform(0.0, seconds), self._unless_over(action))
        if chance.random() < faults.loan_stutters:
            pause_s = PAUSE_SHARE * world.scale.exchange_limit_s
            pause = self._unless_over(lambda: home.freeze(pause_s) if home.alive else None)
            # The first one begins before the home knows that the donor takes part.
            pause()
            for number in range(1, STUTTERS):
                self._later(number * (pause_s + BETWEEN_S), pause)

    def _unless_over(self, action: Action) -> Action:
        return lambda: None if self._stopped else action()

    def _later(self, seconds: float, action: Action) -> None:
        self._world.later(seconds, action)

    def _before_callback(self, process: Process) -> None:
        entry = self._crashing.get(process)
        if entry is not None and self._world.fault_random.random() < entry[1]:
            self._kill(entry[0], "killed before a callback")

    def _beat(self) -> None:
        if self._stopped:
            return
        self._later(BEAT_S, self._beat)
        for service in self._world.running():
            self._trouble(service)
        self._servers()

    def _perhaps(self, rate: float, action: Action) -> None:
        """Schedule the action at a random moment before the next draw, with `rate` per second."""
        chance = self._world.fault_random
        if rate > 0.0 and chance.random() < rate * BEAT_S:
            self._later(chance.uniform(0.0, BEAT_S), self._unless_over(action))

    def _duration(self, longest_s: float) -> float:
        return min(longest_s, 0.2 + self._world.fault_random.expovariate(3.0 / longest_s))

    def _trouble(self, service: ServiceProcess) -> None:
        world, faults, kind = self._world, self._world.faults, service.kind
        self._perhaps(faults.freeze.get(kind, 0.0), lambda: self._freeze(service))
        self._perhaps(faults.cut.get(kind, 0.0), lambda: self._cut_off(service))
        if kind == "worker":
            self._perhaps(faults.mute, lambda: world.mute(service, self._duration(LONGEST_MUTE_S)))
            self._perhaps(faults.device_lost, lambda: world.lose_device(service))
        self._perhaps(faults.crash.get(kind, 0.0), lambda: self._kill(service, "kill -9"))
        self._perhaps(faults.isolated.get(kind, 0.0), lambda: self._isolate(service))
        self._perhaps(faults.slow_device.get(kind, 0.0), lambda: self._slow_down(service))
        self._perhaps(faults.device_lost_of.get(kind, 0.0), lambda: world.lose_device(service))

    def _freeze(self, service: ServiceProcess) -> None:
        if service.alive:
            service.freeze(self._duration(LONGEST_FREEZE_S))

    def _cut_off(self, service: ServiceProcess) -> None:
        seconds = self._duration(LONGEST_CUT_S)
        self._world.trace.note("cut off", service.name, f"{seconds:.3f}")
        self._world.broker.cut_off(service.process, seconds)

    def _isolate(self, service: ServiceProcess) -> None:
        seconds = self._duration(LONGEST_CUT_S)
        self._world.trace.note("isolated", service.name, f"{seconds:.3f}")
        self._world.isolate(service, seconds)

    def _slow_down(self, service: ServiceProcess) -> None:
        world, seconds = self._world, self._duration(LONGEST_CUT_S)
        factor = world.fault_random.choice(SLOW)
        world.trace.note("slow device", service.name, f"{factor:g} {seconds:.3f}")
        faults = world.role_workers[service.name].faults
        faults.slowdown = factor
        self._later(seconds, lambda: setattr(faults, "slowdown", 1.0))

    def _kill(self, service: ServiceProcess, why: str) -> None:
        if service.alive:
            self._world.kills += 1
            service.kill(why)

    def _servers(self) -> None:
        world, faults = self._world, self._world.faults
        note, broker, postgres = world.trace.note, world.broker, world.postgres

        def during(name: str, begin: Action, end: Action, longest_s: float) -> Action:
            def happens() -> None:
                seconds = self._duration(longest_s)
                note(name, f"{seconds:.3f}")
                begin()
                self._later(seconds, lambda: None if self._stopped else end())

            return happens

        def frozen(name: str, freeze: Callable[[float], None]) -> Action:
            def happens() -> None:
                seconds = self._duration(LONGEST_SERVER_S)
                note(name, f"{seconds:.3f}")
                freeze(seconds)

            return happens

        self._perhaps(faults.broker_down, during("broker stops", broker.stop, broker.start, 4.0))
        self._perhaps(
            faults.fresh_streams,
            during("broker loses its disk", broker.stop, world.restart_broker, 4.0),
        )
        self._perhaps(
            faults.lost_tail,
            during("broker loses power", self._stop_broker, self._restart_broker, 4.0),
        )
        self._perhaps(faults.broker_freeze, frozen("broker freezes", broker.freeze))
        slow_s = world.fault_random.uniform(0.1, 1.0) if faults.broker_slow else 0.0
        self._perhaps(
            faults.broker_slow,
            during("broker slow", lambda: world.slow_broker(slow_s), lambda: world.slow_broker(0.0), 6.0),
        )
        self._perhaps(
            faults.disk_full,
            during(
                "broker's disk full",
                lambda: broker.set_storage(world.fault_random.choice((Storage.FULL, Storage.SILENT))),
                lambda: broker.set_storage(Storage.STORES),
                LONGEST_SERVER_S,
            ),
        )
        self._perhaps(faults.postgres_down, during("postgres crashes", postgres.crash, postgres.start, 8.0))
        self._perhaps(faults.postgres_freeze, frozen("postgres freezes", postgres.freeze))
        self._perhaps(
            faults.postgres_slow,
            frozen("postgres slow", lambda s: postgres.slow_down(s, world.fault_random.uniform(0.05, 0.5))),
        )
        self._perhaps(
            faults.postgres_full,
            during(
                "postgres's disk full",
                lambda: setattr(postgres, "disk_full", True),
                lambda: setattr(postgres, "disk_full", False),
                LONGEST_SERVER_S,
            ),
        )
        self._perhaps(faults.hot_lost, world.lose_hot_store)
        self._perhaps(faults.hot_freeze, frozen("redis freezes", world.hot.freeze))
        self._perhaps(
            faults.hot_slow,
            frozen("redis slow", lambda s: world.hot.slow_down(s, world.fault_random.uniform(0.05, 0.5))),
        )
        self._perhaps(faults.new_weights, self._update)

    def _stop_broker(self) -> None:
        if self._world.broker.up:
            self._unwritten_since = self._world.loop.time() - self._duration(LONGEST_UNWRITTEN_S)
        self._world.broker.stop()

    def _restart_broker(self) -> None:
        # Another fault's end may have started it, with all that it had stored.
        if not self._world.broker.up:
            self._world.restart_broker_without_tail(self._unwritten_since)

    def _update(self) -> None:
        """Start a rolling update: the workers are replaced one after another."""
        world = self._world
        world.change_weights()
        for machine in world.machines.living():
            self._replace_later(machine.worker)
        for service in world.living_role_workers():
            self._replace_later(service)

    def _replace_later(self, worker: ServiceProcess) -> None:
        def replace() -> None:
            if worker.alive and not self._stopped:
                self._world.trace.note("replaced", worker.name)
                worker.stop()

        self._later(self._world.fault_random.uniform(*REPLACED_S), replace)
