"""Replays of a trace through the real cores with fixed parameters: cost and lateness of each piece."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turboserve.autoscaler.control.budget import budget
from turboserve.autoscaler.control.policy import ControlPolicy
from turboserve.experiments.autoscale.plant import Plant
from turboserve.experiments.autoscale.simulation import Simulation
from turboserve.experiments.autoscale.sizers import Controlled, flat_table
from turboserve.experiments.autoscale.trace import WorkloadTrace


@dataclass(frozen=True)
class Parameters:
    """The parameters that profiling searches for."""

    rho: float
    """ρ̂."""
    weight: float = 0.2
    """λ."""
    predictive: bool = False
    """Whether the forecast is a lower bound."""

    def __str__(self) -> str:
        return f"ρ̂ {self.rho:g}, λ {self.weight:g}{', forecast' if self.predictive else ''}"


@dataclass(frozen=True)
class Share:
    """Cost and lateness of one piece of a replay."""

    cost_s: float
    late: int
    worst_s: float


class Replays:
    """Replays of whole traces with fixed parameters; each is run when one of its pieces is requested."""

    def __init__(self, plant: Plant, policy: ControlPolicy) -> None:
        self._plant, self._policy = plant, policy
        self._made: dict[tuple[int, float, Parameters], list[Share]] = {}
        self._traces: dict[int, WorkloadTrace] = {}
        """References that keep the traces alive, because their identity is the key."""

    def share(self, trace: WorkloadTrace, length_s: float, piece: int, parameters: Parameters) -> Share:
        """Return the share of the piece from `piece` × `length_s` on.

        Sessions that still wait at its end count toward the next piece.
        """
        key = (id(trace), length_s, parameters)
        if key not in self._made:
            self._traces[id(trace)] = trace
            self._made[key] = self._replay(trace, length_s, parameters)
        return self._made[key][piece]

    def _replay(self, trace: WorkloadTrace, length_s: float, parameters: Parameters) -> list[Share]:
        plant, policy = self._plant, self._policy
        table = flat_table(parameters.rho, parameters.weight, parameters.predictive)
        size = budget(trace.active()[0], plant.capacity, table.levels[0], most=plant.most)
        simulation = Simulation(
            trace, plant, Controlled(policy, table, min(max(size, policy.least), policy.most))
        )
        outcome = simulation.outcome
        shares: list[Share] = []
        cost_s, late = 0.0, 0
        pieces = max(math.ceil(trace.ends_s / length_s), 1)
        for piece in range(pieces):
            if piece < pieces - 1:
                simulation.advance((piece + 1) * length_s)
                simulation.fleet.advance((piece + 1) * length_s)
            else:
                simulation.run()
            shares.append(Share(outcome.cost_s - cost_s, outcome.late - late, outcome.worst_s))
            cost_s, late = outcome.cost_s, outcome.late
            outcome.worst_s = outcome.worst_served_s = 0.0
        return shares
