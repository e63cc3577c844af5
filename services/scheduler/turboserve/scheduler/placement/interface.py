"""The interfaces of assignment and of rebalancing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turboserve.scheduler.placement.cluster import Cluster
from turboserve.scheduler.placement.types import Candidate, Choice, Demand, Migration


class Assigner(Protocol):
    """What the scheduler calls: like `Placement`, with the candidates taken from the cluster.

    `assign` leaves the cluster as it is. The caller puts the choices that it carries out into the cluster.
    """

    def assign(self, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]: ...


class Placement(Assigner, Protocol):
    """Decides for all sessions that need a worker at one event (TurboServe, 5.2.1).

    - `candidates` are the workers that may get sessions (alive, ready, not draining), in order of id.
    - `demands` are in order of precedence. An earlier one does not wait so that a later one of the same model
      gets a slot.
    - The result has one choice per demand, in the same order. With the earlier choices counted, no choice
      puts a worker's load above its capacity.
    - The result depends only on the arguments.
    """

    def place(self, candidates: Sequence[Candidate], demands: Sequence[Demand]) -> list[Choice]: ...

    def assign(self, cluster: Cluster, demands: Sequence[Demand]) -> list[Choice]:
        return self.place(cluster.candidates(), demands) if demands else []


def serving_by_kind(
    candidates: Sequence[Candidate], demands: Sequence[Demand]
) -> dict[tuple[str, str | None], list[Candidate]]:
    """Group the candidates by the `Demand.kind_of_worker` that they serve. Each kind reads the list once."""
    serving: dict[tuple[str, str | None], list[Candidate]] = {}
    for demand in demands:
        if demand.kind_of_worker not in serving:
            serving[demand.kind_of_worker] = [c for c in candidates if c.serves(demand)]
    return serving


def why_not(candidates: int, refused: bool, demand: Demand) -> str:
    """Return why no worker takes the session. `refused`: one of the candidates has refused it."""
    if candidates == 0 and demand.weights_digest is not None:
        return f"no worker with the weights {demand.weights_digest} is ready"
    if candidates == 0:
        return f"no worker that serves {demand.model} is ready"
    if refused:
        return "all workers with free slots have refused it"
    one = candidates == 1
    workers = "the only worker" if one else f"all {candidates} workers"
    if demand.weights_digest is not None:
        kind = f"with the weights {demand.weights_digest}"
    else:
        kind = f"that {'serves' if one else 'serve'} {demand.model}"
    return f"{workers} {kind} {'is' if one else 'are'} full"


class Rebalancer(Protocol):
    """Proposes migrations (TurboServe, 5.2.1: migration-aware min-max rebalancing).

    - The result depends only on the arguments: the same cluster and time give the same migrations in the same
      order.
    - Proposals count on migrations under way (`SessionState.target`). A caller that begins a migration puts
      the session with its target into the cluster before the next call.
    - Each session is in at most one migration.
    - A target is ready, not suspect and of the session's model. For an active session it has a free slot even
      if no migration under way ever ends.
    - All migrations of one call may begin at once. They are in the order in which to begin them if not all
      can: drains first, and active sessions before suspended ones.
    """

    def propose(self, cluster: Cluster, now: float) -> list[Migration]: ...


class NeverMigrates:
    """Proposes no migrations; for a scheduler without rebalancing."""

    def propose(self, cluster: Cluster, now: float) -> list[Migration]:
        return []
