"""Breaks things at the rates of a run's climate, and mends servers, cables and processes that stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turboserve.bench.simulate.kernel import Action, Program

if TYPE_CHECKING:
    from turboserve.bench.simulate.world import World

BEAT_S = 0.5
LONGEST_FREEZE_S = 12.0
LONGEST_CUT_S = 14.0
LONGEST_MUTE_S = 40.0


class Troubles:
    """Twice a second it throws the dice for everything that can go wrong until it throws them again, and when
    in that time it does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stopped = False
        self.kills = 0
        world.kernel.crash_chance = self._crashes
        world.kernel.at(BEAT_S, self._beat)

    def stop(self) -> None:
        """Nothing breaks any more; servers and cables are mended, what stands still goes on in its time."""
        self._stopped = True
        world = self._world
        world.network.up = True
        world.network.cut.clear()
        world.chunks.muted.clear()
        world.database.in_doubt = 0.0
        if not world.database.up:
            world.database.recover()

    def _programs(self) -> list[Program]:
        return [*self._world.services, *(worker.program for worker in self._world.workers.values())]

    def _crashes(self, program: Program) -> bool:
        faults = self._world.network.faults
        crashes = self._world.kernel.chance(faults.crash_step.get(program.kind, 0.0))
        self.kills += crashes
        return crashes

    def _beat(self) -> None:
        if self._stopped:
            return
        self._world.kernel.at(BEAT_S, self._beat)
        for program in self._programs():
            if program.up:
                self._trouble(program)
        self._servers()

    def _perhaps(self, rate: float, action: Action) -> None:
        """Do it at any moment before the next throw, at so much per second."""
        kernel = self._world.kernel
        if kernel.chance(rate * BEAT_S):
            kernel.at(kernel.random.uniform(0.0, BEAT_S), lambda: None if self._stopped else action())

    def _for(self, longest_s: float) -> float:
        return min(longest_s, 0.2 + self._world.kernel.random.expovariate(3.0 / longest_s))

    def _trouble(self, program: Program) -> None:
        world, faults, kind = self._world, self._world.network.faults, program.kind
        self._perhaps(faults.freeze.get(kind, 0.0), lambda: self._freeze(program))
        self._perhaps(
            faults.cut.get(kind, 0.0), lambda: world.network.cut_off(program, self._for(LONGEST_CUT_S))
        )
        if kind == "worker":
            self._perhaps(faults.mute, lambda: self._mute(program))
        self._perhaps(faults.crash.get(kind, 0.0), lambda: self._kill(program))

    def _freeze(self, program: Program) -> None:
        if program.up:
            program.freeze(self._for(LONGEST_FREEZE_S))

    def _mute(self, program: Program) -> None:
        world = self._world
        world.chunks.muted[program.name] = world.kernel.now + self._for(LONGEST_MUTE_S)

    def _kill(self, program: Program) -> None:
        if program.up:
            self.kills += 1
            program.kill("kill -9")

    def _servers(self) -> None:
        world, faults = self._world, self._world.network.faults
        world.database.in_doubt = faults.commit_in_doubt
        self._perhaps(faults.broker_down, self._broker_stops)
        self._perhaps(faults.postgres_down, self._postgres_crashes)
        self._perhaps(faults.hot_lost, world.hot.lose)

    def _broker_stops(self) -> None:
        world = self._world
        if world.network.up:
            world.network.stop()
            world.kernel.at(self._for(4.0), self._broker_returns)

    def _postgres_crashes(self) -> None:
        world = self._world
        if world.database.up:
            world.database.crash()
            world.kernel.at(self._for(8.0), self._postgres_returns)

    def _broker_returns(self) -> None:
        self._world.network.up = True

    def _postgres_returns(self) -> None:
        if not self._world.database.up:
            self._world.database.recover()
