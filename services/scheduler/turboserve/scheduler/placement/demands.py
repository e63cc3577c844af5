"""A placement's question and answer: candidates, demands and choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
