"""The family of declared capability matrices, and the mixes of classes.

Nothing here is measured: every n_kj is declared. The documentation describes the family ("Unequal workers").
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.scheduler.placement.pool import CHUNK_S
from turboserve.scheduler.placement.types import Candidate

CLASSES = (
    SessionClass("large", 1280, 720),
    SessionClass("large", 832, 480),
    SessionClass("small", 1280, 720),
    SessionClass("small", 832, 480),
)
"""In the order of OServe's SILO, LILO, SISO and LISO: the first two are heavy."""
MIXES: Mapping[str, Sequence[float]] = {
    "uniform": (0.25, 0.25, 0.25, 0.25),
    "S1": (0.263, 0.262, 0.273, 0.202),
    "S2": (0.300, 0.280, 0.242, 0.178),
    "S3": (0.188, 0.189, 0.355, 0.268),
    "S4": (0.132, 0.142, 0.411, 0.315),
    "S5": (0.082, 0.082, 0.471, 0.366),
}
"""Share of each class in the sessions (OServe, Table 1). The shares of S5 add up to 1.001, as published."""
KINDS = 4
WORKERS_OF_KIND = 4
HEAVY, LIGHT = (1 / 6, 1 / 3), (1 / 16, 1 / 8)
"""Part of the reference worker's time that one session takes; log-uniform."""
SPEED = (0.7, 2.8)
"""Speed of a kind against the reference worker; log-uniform."""
AFFINITY_SIGMA, AFFINITY = 0.3, (0.5, 2.0)
"""What a kind does better or worse with one class than its speed says: log-normal around 1, clipped."""
FIXED = (0.0, 0.2)
"""Part of a full batch's time that does not depend on its size; uniform."""
HEAVY_BYTES, LIGHT_BYTES = (3e9, 6e9), (1e9, 2e9)
"""Bytes of a session's state; uniform."""
MEMORY_BYTES = (24_000_000_000, 48_000_000_000, 80_000_000_000)
"""Memory for states of a kind; one of these."""
SLOTS = 64
"""Sessions that a worker takes at most, whatever their class."""


@dataclass(frozen=True)
class Matrix:
    """One capability matrix: the workers of a pool."""

    number: int
    capabilities: Sequence[Capability]
    """Capability of each kind. Its n_kj are declared."""
    latency_s: Sequence[Mapping[SessionClass, Mapping[int, float]]]
    """L_kj(b) of each kind, seconds, by class and batch size."""
    workers: int = WORKERS_OF_KIND
    """Number of workers of each kind."""

    def candidates(self) -> list[Candidate]:
        """Return the empty workers."""
        return [
            Candidate(
                worker=f"kind{k}-{i}",
                model="mixed",
                capacity=SLOTS,
                load=0,
                capability=capability,
                class_latency_s=self.latency_s[k],
            )
            for k, capability in enumerate(self.capabilities)
            for i in range(self.workers)
        ]


def matrix(number: int) -> Matrix:
    """Draw a matrix of the family. Equal numbers give equal matrices."""
    source = random.Random(f"capability matrix {number}")

    def between(limits: tuple[float, float]) -> float:
        low, high = limits
        return exp(source.uniform(log(low), log(high)))

    needs = [between(HEAVY if place < 2 else LIGHT) for place in range(len(CLASSES))]
    fixed = [source.uniform(*FIXED) for _ in CLASSES]
    sizes = [int(source.uniform(*(HEAVY_BYTES if place < 2 else LIGHT_BYTES))) for place in range(4)]
    capabilities, latencies = [], []
    for _ in range(KINDS):
        speed, memory = between(SPEED), source.choice(MEMORY_BYTES)
        sessions, latency = {}, {}
        for one, need, fixed_part, size in zip(CLASSES, needs, fixed, sizes, strict=True):
            affinity = min(max(exp(source.gauss(0.0, AFFINITY_SIGMA)), AFFINITY[0]), AFFINITY[1])
            exact = max(1.0, speed * affinity / need)
            sessions[one] = min(int(exact), memory // size)
            latency[one] = {
                batch: CHUNK_S * (fixed_part + (1 - fixed_part) * batch / exact)
                for batch in range(1, int(exact) + 2)
            }
        capabilities.append(Capability(sessions, dict(zip(CLASSES, sizes, strict=True)), memory))
        latencies.append(latency)
    return Matrix(number, capabilities, latencies)


def classes_drawn(mix: str, seed: int) -> Iterator[SessionClass]:
    """Draw the classes of sessions in the order in which they come, without end."""
    source = random.Random(f"classes of {mix} {seed}")
    while True:
        yield from source.choices(CLASSES, MIXES[mix], k=256)


def coefficient_of_variation(shares: Sequence[float]) -> float:
    """Return the population deviation of the shares over their mean, as OServe's CV."""
    mean = sum(shares) / len(shares)
    return float((sum((share - mean) ** 2 for share in shares) / len(shares)) ** 0.5 / mean)
