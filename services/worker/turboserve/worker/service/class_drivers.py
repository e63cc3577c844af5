"""Drives the engines of a worker that serves several classes, on the one thread that owns them.

Each class has an engine, so no batch has rows of two classes. The engines share the device: they compute one
after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.gather import Candidate, GatherPolicy, LatencyProfile
from turboserve.worker.engine.interface import Event
from turboserve.worker.service import commands
from turboserve.worker.service.engine_commands import AdmitRequest, EngineCall, EngineCommand
from turboserve.worker.service.engine_driver import EngineDriver
from turboserve.worker.service.packager import FromEngine, GeneratedChunk
from turboserve.worker.service.quality import SlackMeasured

IntervalsS = tuple[float, float, float]
"""Arguments `quiet_s`, `patience_s` and `tier_report_s` of `EngineDriver`."""


class ClassDrivers:
    """The drivers of several engines, with the interface of `EngineDriver`."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        deliver: Callable[[FromEngine], None],
        now: Callable[[], float],
        policy: GatherPolicy,
        intervals_s: IntervalsS,
    ) -> None:
        """`engines`: by class. `policy`: a gather policy as the engines', but not the same object: it chooses
        the class of the next forward."""
        self._now, self._deliver, self._policy = now, deliver, policy
        self._drivers = {
            model: EngineDriver(engine, partial(self._delivered, model), now, *intervals_s)
            for model, engine in engines.items()
        }
        self._slack: dict[str, SlackMeasured] = {}
        """The newest measurement of each class."""
        self._ran_at = dict.fromkeys(self._drivers.values(), -math.inf)
        """When the engine of each driver ended its last step."""
        self._last = 0
        """Position of the class whose work before a forward was done last."""

    @property
    def generate_until(self) -> float:
        """See `EngineDriver.generate_until`. All drivers have the same lease."""
        return next(iter(self._drivers.values())).generate_until

    @property
    def generating(self) -> bool:
        """See `EngineDriver.generating`."""
        return self._now() < self.generate_until

    def has_come(self, session: str, run: int) -> None:
        """See `EngineDriver.has_come`."""
        next(one for one in self._drivers.values() if one.engine.knows(session)).has_come(session, run)

    def device_error_sessions(self, error: BaseException) -> tuple[str, ...]:
        """See `EngineDriver.device_error_sessions`. Executors of all classes share the device."""
        return tuple(name for one in self._drivers.values() for name in one.device_error_sessions(error))

    def step(self) -> list[Event]:
        """See `EngineDriver.step`. As in one engine, everything else comes before a forward."""
        now, drivers = self._now(), list(self._drivers.values())
        for driver in drivers:
            if driver.generating:
                # Also one without work: what is known of its sessions is true of those that have left.
                driver.measure(now)
        for offset in range(1, len(drivers) + 1):
            turn = (self._last + offset) % len(drivers)
            if drivers[turn].generating and drivers[turn].engine.precedes_forward(now):
                self._last = turn
                return self._stepped(drivers[turn], forward=False)
        chosen = self._next_forward(now)
        return [] if chosen is None else self._stepped(chosen, forward=True)

    def _stepped(self, driver: EngineDriver, *, forward: bool) -> list[Event]:
        events = driver.step(forward=forward)
        self._ran_at[driver] = self._now()
        return events

    def _next_forward(self, now: float) -> EngineDriver | None:
        """The driver whose engine computes next: that of the session which the policy puts first. Sessions
        that leave their slots come before all others, as in one engine."""
        found = [
            (one, *one.engine.forward_candidates(now)) for one in self._drivers.values() if one.generating
        ]
        leave = any(leaving for _, _, leaving in found)
        waiting = {one: candidates for one, candidates, leaving in found if candidates and leaving == leave}
        if len(waiting) <= 1:
            return next(iter(waiting), None)
        # The class is chosen by its first row alone. How many rows pay is the engine's question.
        slowest_s = max(one.engine.forward.profile(1) for one in waiting)
        driver_of: dict[str, EngineDriver] = {}
        candidates: list[Candidate] = []
        for one, own in waiting.items():
            driver_of |= dict.fromkeys([candidate.session for candidate in own], one)
            candidates += [in_time_of(each, one.engine.forward.profile(1), slowest_s) for each in own]
        first = self._policy.gather(candidates, LatencyProfile({1: slowest_s}), 1)
        return driver_of[first[0].session] if first else None

    def idle_s(self, *, rested: bool = False) -> float:
        """See `EngineDriver.idle_s`."""
        return min(driver.idle_s(rested=rested) for driver in self._drivers.values())

    def carry_out(self, command: EngineCommand) -> None:
        """See `EngineDriver.carry_out`."""
        if isinstance(command, commands.GenerateUntil | commands.StopGenerating):
            for driver in self._drivers.values():
                driver.carry_out(command)
        elif isinstance(command, AdmitRequest):
            self._drivers[command.admit.model].carry_out(command)
        elif isinstance(command, EngineCall):
            # A session that has left meanwhile has no class: every engine answers that it is unknown.
            first = next(iter(self._drivers.values()))
            self._drivers.get(command.model, first).carry_out(command)
        elif (one := self._driver_of(command.session)) is not None:
            one.carry_out(command)

    def stamp(self, event: Event) -> None:
        """See `EngineDriver.stamp`."""
        if (driver := self._driver_of(event.session)) is not None:
            driver.stamp(event)

    def _driver_of(self, session: str) -> EngineDriver | None:
        return next((one for one in self._drivers.values() if session in one.runs), None)

    def _delivered(self, model: str, item: FromEngine) -> None:
        if isinstance(item, GeneratedChunk):
            # L(b) of a class is the time of its own batches: a chunk does not refine it whose time contains
            # those of other classes, also of sessions that have their chunks or are gone.
            alone = not any(
                self._ran_at[driver] > item.ready.timings.started_s
                or any(held.work is not None or held.undecoded for held in driver.engine.sessions.values())
                for name, driver in self._drivers.items()
                if name != model
            )
            item = replace(item, model=model, sample=item.sample if alone else None)
        elif isinstance(item, SlackMeasured):
            item = self._together(model, item)
        self._deliver(item)

    def _together(self, model: str, measured: SlackMeasured) -> SlackMeasured:
        """The measurement of one class with the newest ones of the others, without what has left since."""
        self._slack[model] = measured
        sessions = {
            name: (run, playout.after(max(0.0, measured.at_s - one.at_s)))
            for of, one in self._slack.items()
            for name, (run, playout) in one.sessions.items()
            if (held := self._drivers[of].runs.get(name)) is not None and held.run == run
        }
        late = sum(one.late for one in self._slack.values())
        return SlackMeasured(measured.at_s, sessions, measured.tiers_changed, late)


def in_time_of(candidate: Candidate, own_s: float, other_s: float) -> Candidate:
    """Return the candidate as if each forward of the chunk that it has begun took `other_s` instead of
    `own_s`.

    A policy adds these forwards to the credit, in one time for all, so that a begun chunk keeps its turn.
    """
    if not candidate.step:
        return candidate
    return replace(candidate, credit_s=candidate.credit_s + candidate.steps_left * (own_s - other_s))
