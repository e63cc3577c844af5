"""What placement is told of one worker and of one session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WorkerState:
    """One worker that is not gone."""

    id: str
    model: str
    capacity: int
    """Slots: what its memory and its own limit allow. What the target chunk latency allows may be less."""
    weights_digest: str | None = None
    """Sessions move between workers of equal weights only. None: not known."""
    ready: bool = True
    """It may be given sessions: serving, not draining, not being declared gone, not called full."""
    draining: bool = False
    """It is to be emptied: every session on it, suspended ones too, goes elsewhere."""
    suspect: bool = False
    """Not heard of when it should have been: given sessions only if there is no other, nothing moved."""
    chunk_latency_s: Mapping[int, float] = field(default_factory=dict)
    """Measured profile L(b): seconds of a chunk by sessions in the batch; empty: not measured."""
    host: str = ""
    """Machine it runs on, `HOST` or `NODE/HOST` (see `links`); empty: not known, far from everybody."""


@dataclass(frozen=True)
class SessionState:
    """One session that has not ended."""

    id: str
    model: str
    worker: str | None = None
    """Its row's owner; for a suspended one, who holds its state in host memory."""
    suspended: bool = False
    """It holds no slot on `worker`, only host memory."""
    target: str | None = None
    """Where it is moving to, from the decision until the row says how the move ended. It counts at both ends:
    a slot at the target too, unless it is suspended."""
    reserved: str | None = None
    """Where it was placed by a decision that is not confirmed yet: a slot there."""
    state_bytes: int = 0
    """What a move of it transfers; 0: not known, only the fixed part of the cost counts."""
    weights_digest: str | None = None
    """Of the worker that made its state. None: it has none yet, or that worker did not say."""
    movable: bool = True
    """False: a command is under way for it, or its row is in doubt."""
    rests_until: float = 0.0
    """Not moved for balance before this time, the same clock as `now` in `Rebalancer.propose`: it has moved,
    or failed to, a short while ago. A drain does not wait for it."""
    excluded: frozenset[str] = frozenset()
    """Workers that have refused it, or to which a move of it has failed."""
