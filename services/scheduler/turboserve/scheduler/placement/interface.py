"""Where a session goes: the interface of all assignment algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.demands import Candidate, Choice, Demand


class Assigner(Protocol):
    """What the scheduler asks: as `Placement`, with the candidates taken from the cluster.

    Choices are not put into the cluster: whoever carries them out does that.
    """

    def assign(self, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]: ...


class Placement(Assigner, Protocol):
    """Decides for all sessions that need a worker at one event (TurboServe, 5.2.1).

    `candidates` are the workers that may be given sessions: alive, ready, not draining; in order of id.
    `demands` come in order of precedence: an earlier one is not left waiting so that a later one of the same
    model gets the slot. Returns one Choice per demand, in the same order, and never puts a worker's load
    above its capacity, counting the choices before. Depends on nothing but its arguments: the same cluster
    and demands give the same choices.
    """

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]: ...

    def assign(self, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
        return self.place(cluster.candidates(), demands) if demands else []


def serving_by_kind(
    candidates: Sequence[Candidate], demands: Sequence[Demand]
) -> dict[tuple[str, str | None], list[Candidate]]:
    """The candidates that serve each demand, by `Demand.kind_of_worker`: one look at all of them per kind."""
    serving: dict[tuple[str, str | None], list[Candidate]] = {}
    for demand in demands:
        if demand.kind_of_worker not in serving:
            serving[demand.kind_of_worker] = [c for c in candidates if c.serves(demand)]
    return serving


def why_not(candidates: int, refused: bool, demand: Demand) -> str:
    """Why nobody takes the session; `refused`: one of the candidates did."""
    if candidates == 0 and demand.weights_digest is not None:
        return f"no worker with the weights {demand.weights_digest} is ready"
    if candidates == 0:
        return f"no worker that serves {demand.model} is ready"
    if refused:
        return "the workers with room have refused it"
    if demand.weights_digest is not None:
        return f"all {candidates} workers with the weights {demand.weights_digest} are full"
    return f"all {candidates} workers that serve {demand.model} are full"
