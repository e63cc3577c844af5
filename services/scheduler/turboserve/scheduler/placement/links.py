"""The cost of a transfer between two workers: κ = α + bytes / β, per kind of link (TurboServe, 5.2.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class LinkKind(Enum):
    """The distance between two workers, from near to far."""

    HOST = "same host"
    """The same machine or container: shared memory."""
    NODE = "same node"
    """The same group of hosts with a fast interconnect, such as NVLink."""
    ACROSS = "across"
    """All other pairs, and all workers whose host is not known."""


def node_of(host: str) -> str:
    """Return the node of `NODE/HOST`. A host without a node is a node by itself."""
    node, slash, _ = host.rpartition("/")
    return node if slash else host


def kind_between(host: str, other: str) -> LinkKind:
    """Return the kind of link between workers on two hosts."""
    if not host or not other:
        return LinkKind.ACROSS
    if host == other:
        return LinkKind.HOST
    return LinkKind.NODE if node_of(host) == node_of(other) else LinkKind.ACROSS


@dataclass(frozen=True)
class Link:
    """One kind of link."""

    alpha_s: float
    """α: fixed cost of a migration in seconds, for the reservation, the verification and the row."""
    bytes_per_s: float
    """β: bandwidth, bytes per second."""

    def seconds(self, size: int) -> float:
        """Return κ of a state of `size` bytes, in seconds."""
        return self.alpha_s + size / self.bytes_per_s


DEFAULTS: Mapping[LinkKind, Link] = {
    LinkKind.HOST: Link(0.023, 956e9),
    LinkKind.NODE: Link(0.023, 956e9),
    LinkKind.ACROSS: Link(0.023, 50e9),
}
"""Values before the first measurement: NVLink and InfiniBand of the paper's clusters (7.1), and 23 ms for a
migration (Table 4)."""


FORGET = 0.9
"""Factor on the weight of earlier measurements at each new one."""
SPREAD = 0.1
"""Relative spread of sizes below which β is not estimated."""


@dataclass
class _Sums:
    """Sums of a least-squares line; older measurements weigh exponentially less."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.n = FORGET * self.n + 1.0
        self.x = FORGET * self.x + x
        self.y = FORGET * self.y + y
        self.xx = FORGET * self.xx + x * x
        self.xy = FORGET * self.xy + x * y


class Links:
    """α and β of every kind of link. The defaults apply until migrations are measured."""

    def __init__(self, known: Mapping[LinkKind, Link] = DEFAULTS) -> None:
        self.known = {**DEFAULTS, **known}
        self._sums = {kind: _Sums() for kind in LinkKind}

    def seconds(self, kind: LinkKind, size: int) -> float:
        """Return κ of migrating `size` bytes over a link of this kind, in seconds."""
        return self.known[kind].seconds(size)

    def observe(self, kind: LinkKind, size: int, seconds: float) -> None:
        """Add a measured migration and fit α and β again, by least squares over the latest measurements."""
        sums = self._sums[kind]
        sums.add(float(size), seconds)
        self.known[kind] = _fit(sums, self.known[kind])


def _fit(sums: _Sums, before: Link) -> Link:
    """Fit a line through the measurements.

    While the sizes are too similar, β keeps its value. If α would be negative, the line goes through the
    origin instead.
    """
    size, seconds = sums.x / sums.n, sums.y / sums.n
    variance = sums.xx / sums.n - size * size
    per_byte = 1.0 / before.bytes_per_s
    if size > 0 and variance > (SPREAD * size) ** 2:
        per_byte = max(0.0, (sums.xy / sums.n - size * seconds) / variance)
    alpha_s = seconds - per_byte * size
    if alpha_s < 0:
        alpha_s, per_byte = 0.0, seconds / size
    return Link(alpha_s, 1.0 / per_byte if per_byte > 0 else float("inf"))
