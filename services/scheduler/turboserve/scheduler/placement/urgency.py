"""Playout slacks of sessions: as reported, what is left of them now, and what they mean for workers.

A worker's slacks show how many late chunks it expects, and whether it has room for an urgent session.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from turboserve.contracts.fidelity import Tier
from turboserve.scheduler.placement.lateness import late_chunks
from turboserve.scheduler.placement.pool import NO_WORKER, Pool, PoolEntry
from turboserve.static_frozen import statically_frozen

FIRST_CHUNK = 4.0
"""Slack of a session without a report, as a multiple of a chunk's time (SlackServe, Appendix C)."""
EXTRAPOLATE_S = 2.0
"""Longest time for which a slack is extrapolated, seconds. A worker reports each second and at once when a
tier changes. A worker that is silent for longer becomes suspect, and suspect workers take no part."""


@statically_frozen()
class ReportedSlack:
    """One session's slack by its worker's last report. Times are in seconds."""

    slack_s: float
    """P: video that the viewer has left, or time until the first chunk's deadline, at `at`."""
    credit_s: float
    """C = P − (R + T), at `at`."""
    at: float
    """Arrival of the report, on the scheduler's monotonic clock."""
    tier: Tier = Tier.NORMAL
    playing: bool = True
    """Whether the slack shrinks with time."""


def slack_at(known: ReportedSlack, now: float) -> float:
    """Return a session's slack at monotonic time `now`, in seconds (SlackServe, 3.1).

    While a viewer plays, the slack falls by the time since the report, but for at most R + T: by then the
    worker has finished the chunk in work or the next one, which adds at least as much as a real-time worker
    takes for it. The fall is also at most `EXTRAPOLATE_S`. The slack of a viewer who does not play stays.
    """
    if not known.playing:
        return known.slack_s
    generating_s = max(0.0, known.slack_s - known.credit_s)
    return known.slack_s - min(max(0.0, now - known.at), generating_s, EXTRAPOLATE_S)


class Urgency:
    """The slack of each session, and per worker the late chunks that it expects.

    A worker is counted again only after a change of its sessions, their slacks or its profile. The count is
    as of the newest report about its sessions, so it depends on the cluster alone, not on when it is made.
    """

    def __init__(self) -> None:
        self.slacks: dict[str, ReportedSlack] = {}
        """Session → its last reported slack. Sessions without one are missing."""
        self.changed: set[str] = set()
        """Workers that have changed, or whose sessions have, since they were counted."""
        self._horizon_s = self._alpha = 0.0
        self._pools: dict[str, Pool] = {}
        """Worker → the pool whose rankings have it."""
        self._reporting: dict[str, Pool] = {}
        """Worker with a session whose slack is known, even one that drains → its pool."""

    def refresh(
        self,
        entries: Mapping[str, PoolEntry],
        pool_of: Callable[[str, str | None], Pool],
        horizon_s: float,
        alpha: float,
    ) -> None:
        """Update the rankings `Pool.late` and `Pool.relaxed` for late chunks within `horizon_s`.

        `entries` has all workers; `pool_of` returns the pool of a model and of weights. `alpha`: slack of an
        urgent session, as a multiple of a chunk's time.
        """
        if (horizon_s, alpha) != (self._horizon_s, self._alpha):
            self._horizon_s, self._alpha = horizon_s, alpha
            self.changed |= entries.keys()
        for name in self.changed:
            entry = entries.get(name)
            before = self._pools.pop(name, None)
            pool = None
            if entry is not None and entry.serves and self.known(entry):
                pool = self._pools[name] = pool_of(entry.state.model, entry.state.weights_digest)
            self._reporting.pop(name, None)
            if entry is not None and entry.state is not NO_WORKER and self._reports(entry):
                self._reporting[name] = pool_of(entry.state.model, entry.state.weights_digest)
            if before is not None and before is not pool:
                before.late.put(name, None)
                before.relaxed.put(name, None)
            if entry is not None and pool is not None:
                self._rank(pool, entry)
        self.changed.clear()

    def reported_in(self, pool: Pool) -> bool:
        """Whether any worker of the pool has reported slack, by the last `refresh`."""
        return any(its is pool for its in self._reporting.values())

    def known(self, entry: PoolEntry) -> bool:
        """Whether the worker is empty or reports slack. Workers of earlier versions do not."""
        staying = _staying(entry)
        return not staying or any(name in self.slacks for name in staying)

    def late(
        self,
        entry: PoolEntry,
        now: float,
        horizon_s: float,
        without: Collection[str] = (),
        coming: Mapping[str, float] | None = None,
    ) -> int:
        """Return the late chunks that a worker expects from `now` on.

        `without`: sessions that leave. `coming`: sessions that come, with the seconds in which their slack
        falls before the worker can generate for them.
        """
        slacks = self._slacks_s(entry, _staying(entry).difference(without), now)
        for name, delay_s in (coming or {}).items():
            slacks += [slack_s - delay_s for slack_s in self._slacks_s(entry, (name,), now)]
        return late_chunks(entry.floor_curve, slacks, horizon_s)

    def playing(self, entry: PoolEntry, without: Collection[str] = (), coming: Collection[str] = ()) -> int:
        """Return the number of sessions on a worker whose viewers need chunks. See `late`."""
        names = _staying(entry).difference(without).union(coming)
        return sum((known := self.slacks.get(name)) is None or known.playing for name in names)

    def _reports(self, entry: PoolEntry) -> bool:
        return any(name in self.slacks for name in (*entry.here, *entry.coming))

    def _rank(self, pool: Pool, entry: PoolEntry) -> None:
        horizon_s = self._horizon_s
        staying = _staying(entry)
        now = max((self.slacks[name].at for name in staying if name in self.slacks), default=0.0)
        slacks = self._slacks_s(entry, staying, now)
        late = late_chunks(entry.floor_curve, slacks, horizon_s)
        pool.late.put(entry.id, (-late, entry.id) if late and entry.here else None)
        item = None
        if entry.held < entry.slots:
            urgent_s = self._alpha * entry.curve(1)
            more = late_chunks(entry.floor_curve, [*slacks, urgent_s], horizon_s) - late
            item = (more, entry.with_more_s(entry.held + 1), entry.id)
        pool.relaxed.put(entry.id, item)

    def _slacks_s(self, entry: PoolEntry, sessions: Iterable[str], now: float) -> list[float]:
        slacks_s = []
        for name in sessions:
            known = self.slacks.get(name)
            if known is None:
                slacks_s.append(FIRST_CHUNK * entry.curve(1))
            elif known.playing:
                slacks_s.append(slack_at(known, now))
        return slacks_s


def _staying(entry: PoolEntry) -> set[str]:
    """Return the sessions on the worker once all that is under way is done."""
    return (entry.here - entry.going) | entry.coming
