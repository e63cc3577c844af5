"""The picture of workers and sessions that placement decides on, kept up to date change by change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WorkerState:
    """One worker that is not gone."""

    id: str
    model: str
    capacity: int
    """Slots: what its memory and its own limit allow. What the target chunk latency allows may be less."""
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
    movable: bool = True
    """False: a command is under way for it, or its row is in doubt."""
    rests_until: float = 0.0
    """Not moved for balance before this time, the same clock as `now` in `Rebalancer.propose`: it has moved,
    or failed to, a short while ago. A drain does not wait for it."""
    excluded: frozenset[str] = frozenset()
    """Workers that have refused it, or to which a move of it has failed."""


class Cluster:
    """All workers and sessions. Putting one replaces what was known under its id.

    A session may name workers that are not (yet, any more) known: it counts where they are known.
    """

    def __init__(self, workers: Iterable[WorkerState] = (), sessions: Iterable[SessionState] = ()) -> None:
        self.workers: dict[str, WorkerState] = {}
        self.sessions: dict[str, SessionState] = {}
        for worker in workers:
            self.put_worker(worker)
        for session in sessions:
            self.put_session(session)

    def put_worker(self, worker: WorkerState) -> None:
        """It is there, and so."""
        self.workers[worker.id] = worker

    def drop_worker(self, worker: str) -> None:
        """It is gone. Its sessions stay known until they are put elsewhere or dropped."""
        self.workers.pop(worker, None)

    def put_session(self, session: SessionState) -> None:
        """It is there, and so."""
        self.sessions[session.id] = session

    def drop_session(self, session: str) -> None:
        """It has ended."""
        self.sessions.pop(session, None)
