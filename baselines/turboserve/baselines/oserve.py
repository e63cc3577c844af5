"""OServe's assignment (4.2): a flow network solved by preflow-push, and the optimum of its objective."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf, lcm

from turboserve.allocation.classes import SessionClass
from turboserve.allocation.linear import LinearProgram
from turboserve.scheduler.placement.shares import Cells, Demand, Kind, Shares

TINY = 1e-9
"""An excess or a capacity below this is none: gains make flows fractions."""


class FlowShares:
    """Shares by OServe's flow network.

    source → class j (at most d_j) → kind k (at most e_kj = n_kj m_k) → sink (at most M_k m_k)

    with M_k = lcm_j n_kj, and one session of class j takes M_k / n_kj units of kind k. So the edges from
    classes to kinds have gains, and preflow-push, which the paper cites, is made for flows that conserve
    units. Here a push multiplies by the gain. It ends when no path with capacity leads from the source to the
    sink. That is a maximum of a plain flow, but not of a flow with gains: a cycle that serves the same
    sessions with fewer units may remain.
    """

    def __call__(self, kinds: Sequence[Kind], demand: Demand, placed: Cells) -> Shares:
        return _shares(kinds, demand, _preflow_push(kinds, demand))


class MostSessions:
    """Shares that serve as many sessions as possible: the exact optimum of OServe's objective, by its LP."""

    def __call__(self, kinds: Sequence[Kind], demand: Demand, placed: Cells) -> Shares:
        linear = LinearProgram()
        cells: dict[tuple[str, SessionClass], int] = {}
        by_class: dict[SessionClass, list[tuple[int, float]]] = {}
        for kind in kinds:
            terms = []
            for one in sorted(demand):
                if demand[one] > 0 and kind.capability.serves(one):
                    served = kind.capability.sessions[one]
                    column = cells[kind.name, one] = linear.column(0.0, float(served * kind.workers))
                    terms.append((column, 1 / served))
                    by_class.setdefault(one, []).append((column, 1.0))
            if terms:
                linear.row(terms, upper=float(kind.workers))
        for one, terms in by_class.items():
            linear.row(terms, upper=float(demand[one]))
        if not cells:
            return _shares(kinds, demand, {})
        solution = linear.minimize([(column, -1.0) for column in cells.values()])
        return _shares(kinds, demand, {cell: solution.values[column] for cell, column in cells.items()})


def _shares(kinds: Sequence[Kind], demand: Demand, cells: Mapping[tuple[str, SessionClass], float]) -> Shares:
    sessions = {cell: count for cell, count in cells.items() if count > TINY}
    served = {
        one: min(1.0, sum(count for (_, other), count in sessions.items() if other == one) / count_wanted)
        for one, count_wanted in demand.items()
        if count_wanted > 0
    }
    used = dict.fromkeys((kind.name for kind in kinds), 0.0)
    rates = {kind.name: (kind.capability.sessions, kind.workers) for kind in kinds}
    for (name, one), count in sessions.items():
        used[name] += count / rates[name][0][one] / rates[name][1]
    return Shares(sessions, served, min(1.0, max(used.values(), default=0.0)))


class _Network:
    """Arcs with capacities and gains. Arc a and arc a ^ 1 are each other's reverse."""

    def __init__(self, nodes: int) -> None:
        self.arcs: list[list[int]] = [[] for _ in range(nodes)]
        self.head: list[int] = []
        self.room: list[float] = []
        """What the arc still takes, in units of its tail."""
        self.gain: list[float] = []

    def add(self, tail: int, head: int, capacity: float, gain: float = 1.0) -> int:
        arc = len(self.head)
        for start, end, room, factor in ((tail, head, capacity, gain), (head, tail, 0.0, 1 / gain)):
            self.arcs[start].append(len(self.head))
            self.head.append(end)
            self.room.append(room)
            self.gain.append(factor)
        return arc

    def push(self, arc: int, amount: float) -> float:
        """Send `amount` units of the tail; returns the units that arrive."""
        arrived = amount * self.gain[arc]
        self.room[arc] -= amount
        self.room[arc ^ 1] += arrived
        return arrived


def _preflow_push(kinds: Sequence[Kind], demand: Demand) -> dict[tuple[str, SessionClass], float]:
    """Return the flow from each class to each kind, in sessions (Goldberg and Tarjan, FIFO order)."""
    classes = [one for one in sorted(demand) if demand[one] > 0]
    source, sink, nodes = 0, 1, 2 + len(classes) + len(kinds)
    network = _Network(nodes)
    first = [network.add(source, 2 + j, float(demand[one])) for j, one in enumerate(classes)]
    cells: dict[tuple[str, SessionClass], int] = {}
    places = {kind.name: 2 + len(classes) + k for k, kind in enumerate(kinds)}
    unit = {
        kind.name: lcm(*(n for one in classes if (n := kind.capability.sessions.get(one, 0)) > 0))
        for kind in kinds
    }
    for j, one in enumerate(classes):
        # The fastest kind of a class is its first arc.
        serving = [kind for kind in kinds if kind.capability.serves(one)]
        for kind in sorted(serving, key=lambda kind: (-kind.capability.sessions[one], kind.name)):
            served = kind.capability.sessions[one]
            limit = float(served * kind.workers)
            gain = unit[kind.name] / served
            cells[kind.name, one] = network.add(2 + j, places[kind.name], limit, gain)
    for kind in kinds:
        network.add(places[kind.name], sink, float(unit[kind.name] * kind.workers))
    full = {cell: network.room[arc] for cell, arc in cells.items()}
    _run(network, source, sink, first)
    return {cell: full[cell] - network.room[arc] for cell, arc in cells.items()}


def _run(network: _Network, source: int, sink: int, first: Sequence[int]) -> None:
    nodes = len(network.arcs)
    height, excess = [0] * nodes, [0.0] * nodes
    height[source] = nodes
    active: deque[int] = deque()
    for arc in first:
        head = network.head[arc]
        excess[head] += network.push(arc, network.room[arc])
        active.append(head)
    while active:
        node = active.popleft()
        while excess[node] > TINY:
            lowest: float = inf
            for arc in network.arcs[node]:
                if network.room[arc] <= TINY:
                    continue
                head = network.head[arc]
                if height[node] != height[head] + 1:
                    lowest = min(lowest, height[head])
                    continue
                amount = min(excess[node], network.room[arc])
                excess[node] -= amount
                if excess[head] <= TINY and head not in (source, sink):
                    active.append(head)
                excess[head] += network.push(arc, amount)
                if excess[node] <= TINY:
                    break
            else:
                if lowest == inf:
                    break
                height[node] = int(lowest) + 1
