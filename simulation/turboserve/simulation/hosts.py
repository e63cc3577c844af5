"""Clocks and randomness that a simulated process uses instead of its machine's."""

from __future__ import annotations

import random

from turboserve.simulation.runtime.loop import VirtualLoop

EPOCH_S = 1_700_000_000.0
"""Wall-clock time at which every run begins, on a host whose clock is right."""


class HostClock:
    """The clock of one host: monotonic time is the loop's, wall-clock time may be off."""

    def __init__(self, loop: VirtualLoop, skew_s: float = 0.0) -> None:
        self._loop, self.skew_s = loop, skew_s

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return EPOCH_S + self._loop.time() + self.skew_s


class SeededRandomness:
    """A process's source of ids and tokens, determined by a seed."""

    def __init__(self, clock: HostClock, seed: int) -> None:
        self._clock, self._random = clock, random.Random(seed)

    def milliseconds(self) -> int:
        return int(self._clock.wall() * 1000)

    def randbits(self, bits: int) -> int:
        return self._random.getrandbits(bits)
