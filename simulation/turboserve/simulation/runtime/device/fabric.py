"""The data plane that all simulated workers share: its faults, its listeners, and the links in use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from turboserve.simulation.runtime.loop import VirtualLoop
from turboserve.simulation.runtime.process import Process
from turboserve.worker.transfer.network import Serve


@dataclass
class FabricFaults:
    """Probabilities of faults. May be changed at any time."""

    breaks: float = 0.0
    """For each message between two workers: its connection breaks."""
    silent: float = 0.5
    """For each connection that breaks: neither side notices."""
    corrupts: float = 0.0
    """For each round of a copy: a byte arrives wrong."""
    stalls: float = 0.0
    """For each round of a copy: the memory transfer stalls."""


@dataclass(eq=False)
class Listener:
    """A worker that accepts connections."""

    process: Process
    serve: Serve


@dataclass(eq=False)
class Wire:
    """Both ends of a link."""

    source: Process
    rounds: list[tuple[float, list[bytes]]] = field(default_factory=list)
    """Rounds that were sent and not yet taken: the time of arrival, and the pages."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class TransferFabric:
    """The data plane of all workers."""

    def __init__(
        self, loop: VirtualLoop, random: Random, delay_s: float = 0.001, bytes_per_s: float = 50_000.0
    ) -> None:
        """`delay_s` is a message's mean delay; `bytes_per_s` is the pace of a copy, in bytes that exist."""
        self.loop, self.random = loop, random
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self.faults = FabricFaults()
        self.listeners: dict[str, Listener] = {}
        self.wires: dict[str, Wire] = {}
        """Wires by the name of their link, while both ends are open."""
        self.hosts: dict[str, dict[str, Listener]] = {}
        """Workers of each host that lend each other their devices."""
        self.groups: dict[str, object] = {}
        """Ends of groups of two that wait for their other end, by the group's name."""
        self.cut_until: dict[str, float] = {}
        """Worker's name → time until which its connections carry nothing."""
        self._links = 0

    def chance(self, of: float) -> bool:
        """Draw whether a fault of this probability occurs."""
        return of > 0 and self.random.random() < of

    def carries_at(self, ends: Iterable[str]) -> float:
        """Return the time from which a connection between these workers carries messages; 0.0: from now."""
        cut = self.cut_until
        return max((cut.get(end, 0.0) for end in ends), default=0.0) if cut else 0.0

    def new_link(self) -> str:
        """Return a new unique name."""
        self._links += 1
        return f"lnk_{self._links}"
