"""The state of one worker and of one session, as placement sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WorkerState:
    """One worker that is not gone."""

    id: str
    model: str
    capacity: int
    """Slots that the worker's memory and its own limit allow. The target chunk latency may allow fewer."""
    weights_digest: str | None = None
    """Digest of the weights. Sessions migrate only between workers of equal weights. None: not known."""
    ready: bool = True
    """Whether the worker may get sessions: serving, not draining, not being declared gone, not reported
    full."""
    draining: bool = False
    """Whether all sessions of the worker, suspended ones too, must go to other workers."""
    suspect: bool = False
    """Whether the worker's report is overdue. The worker then gets sessions only as a last resort, and the
    rebalancer proposes no migration to or from it."""
    chunk_latency_s: Mapping[int, float] = field(default_factory=dict)
    """Measured profile L(b): seconds of a chunk by sessions in the batch. Empty: not measured."""
    host: str = ""
    """The worker's machine, `HOST` or `NODE/HOST` (see `links`). Empty: not known, far from all others."""


@dataclass(frozen=True)
class SessionState:
    """One session that has not ended."""

    id: str
    model: str
    worker: str | None = None
    """Owner by the session's row. The owner of a suspended session holds its state in host memory."""
    suspended: bool = False
    """Whether the session holds only host memory on `worker`, and no slot."""
    target: str | None = None
    """Target of the session's migration, from the decision until the row shows the end. The session counts at
    source and target; unless it is suspended, it has a slot at both."""
    reserved: str | None = None
    """Worker with a slot reserved for the session by a decision that is not confirmed yet."""
    state_bytes: int = 0
    """Bytes that a migration of the session transfers. 0: not known; only the fixed cost counts."""
    weights_digest: str | None = None
    """Digest of the weights that made the session's state. None: no state yet, or not known."""
    movable: bool = True
    """Whether a migration may begin. False while a command is under way or the row is in doubt."""
    rests_until: float = 0.0
    """The session is not migrated for balance before this time (clock of `now` in `Rebalancer.propose`),
    because a migration of it has just ended. A drain does not wait for this time."""
    excluded: frozenset[str] = frozenset()
    """Workers that have refused the session, or to which a migration of it has failed."""
