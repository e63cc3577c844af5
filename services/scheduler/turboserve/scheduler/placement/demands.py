"""Input and output of a placement: candidates, demands and choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Candidate:
    """One worker that may get sessions."""

    worker: str
    model: str
    capacity: int
    """K: number of slots."""
    load: int
    """Number of sessions that hold a slot or have one reserved."""
    suspect: bool = False
    """Whether the worker's report is overdue, so that it is only a last resort."""
    chunk_latency_s: Mapping[int, float] = field(default_factory=dict)
    """Measured profile L(b): seconds of a chunk by batch size. It may be empty."""
    leaving: int = 0
    """Number of sessions in `load` that migrate to another worker."""
    weights_digest: str | None = None

    def serves(self, demand: Demand) -> bool:
        """Whether the worker has the session's model and, if the session needs certain weights, these."""
        return self.model == demand.model and demand.weights_digest in (None, self.weights_digest)


@dataclass(frozen=True)
class Demand:
    """One session that needs a worker."""

    session: str
    model: str
    kind: str
    """Why the session needs a worker: place, resume, recover, rebuild or migrate."""
    holder: str | None = None
    """Worker with the session's state in host memory. To resume the session there needs no transfer."""
    counted_on: str | None = None
    """The candidate whose `load` already includes the session."""
    excluded: frozenset[str] = frozenset()
    """Workers that must not get the session: they have refused it, or a migration to them has failed."""
    weights_digest: str | None = None
    """Weights that the session's worker must have. None: any weights will do."""

    @property
    def kind_of_worker(self) -> tuple[str, str | None]:
        """Model and weights. Demands with equal values have the same serving candidates."""
        return self.model, self.weights_digest


@dataclass(frozen=True)
class Choice:
    """A placement's answer for one session: a worker (None: the session waits), the reason, the numbers."""

    session: str
    worker: str | None
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)
