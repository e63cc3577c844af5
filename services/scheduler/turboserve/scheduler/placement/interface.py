"""Where a session goes: the interface of all assignment algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from turboserve.scheduler.placement.cluster import Cluster


@dataclass(frozen=True)
class Candidate:
    """One worker that may be given sessions."""

    worker: str
    model: str
    capacity: int
    """K: sessions that fit at once."""
    load: int
    """Sessions that hold a slot or have one reserved."""
    suspect: bool = False
    """It was not heard of when it should have been; better not, if there is another."""
    chunk_latency_s: Mapping[int, float] = field(default_factory=dict)
    """Measured profile L(b), seconds by batch size; may be empty."""
    leaving: int = 0
    """Of `load`, sessions that are on their way to another worker."""
    weights_digest: str | None = None

    def serves(self, demand: Demand) -> bool:
        """Whether it has the model and, if the session needs certain ones, the weights."""
        return self.model == demand.model and demand.weights_digest in (None, self.weights_digest)


@dataclass(frozen=True)
class Demand:
    """One session that needs a worker."""

    session: str
    model: str
    kind: str
    """place, resume or recover."""
    holder: str | None = None
    """Who has its state in host memory: going on there moves nothing."""
    counted_on: str | None = None
    """The candidate whose `load` already includes this session."""
    excluded: frozenset[str] = frozenset()
    """Workers that have refused it."""
    weights_digest: str | None = None
    """It goes only where these weights are; None: to any worker of its model."""

    @property
    def kind_of_worker(self) -> tuple[str, str | None]:
        """Equal for demands that the same candidates serve."""
        return self.model, self.weights_digest


@dataclass(frozen=True)
class Choice:
    """What a placement says of one session: a worker, or (None) that it waits; why; and the numbers."""

    session: str
    worker: str | None
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


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
