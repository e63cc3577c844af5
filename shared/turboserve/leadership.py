"""Decides which of several processes of a service leads. No clock, no I/O: time and answers are arguments.

The store's row contains no time:

- A leader counts its lease from the moment at which it *requested* the renewal.
- A candidate counts the silence from the moment at which it *received* the present state of the row.
- The store's commit lies between the two. So the old leader's lease ends before the candidate's wait does,
  and no process compares its monotonic clock with that of another.
- If a clock or a process stops for a while, the term decides: the store refuses requests of an old term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from turboserve.contracts.leading import LeaderRecord


@dataclass(frozen=True)
class Lease:
    """Times of the lead, in seconds."""

    renew_s: float = 0.5
    """Interval at which the leader renews and a standby reads the row."""
    lease_s: float = 4.0
    """A leader makes no more decisions this long after it requested its last successful renewal."""
    timeout_s: float = 5.0
    """A leader whose row has not changed for this long may be replaced. It exceeds the lease by a margin."""

    def __post_init__(self) -> None:
        if not self.renew_s < self.lease_s < self.timeout_s:
            raise ValueError(
                f"leader_lease_s: {self.lease_s:g} is not between leader_renew_s ({self.renew_s:g}) "
                f"and leader_timeout_s ({self.timeout_s:g})"
            )


@dataclass(frozen=True)
class ReadLeader:
    """Read the leader's row."""


@dataclass(frozen=True)
class TakeLead:
    """Take the lead if the row still has this term and beat, or has no holder."""

    term: int
    beat: int


@dataclass(frozen=True)
class RenewLead:
    """Renew the lead in this term."""

    term: int


Ask = ReadLeader | TakeLead | RenewLead


class Leadership:
    """Leadership of one process.

    At most one request is under way: `tick` returns it, and `answered`, `refused` or `failed` ends it.
    """

    def __init__(self, me: str, lease: Lease | None = None) -> None:
        self.me = me
        self.lease = lease or Lease()
        self.seen: LeaderRecord | None = None
        """The row as last received."""
        self.followed = False
        """Whether this instance has seen another one renew, so that it is a standby of a working leader."""
        self.term: int | None = None
        """The term in which this instance leads, or led until just now. No term is won twice."""
        self._until = 0.0
        self._seen_at = 0.0
        self._next_at = -math.inf
        self._asked: tuple[Ask, float] | None = None

    def leads(self, now: float) -> bool:
        """Whether this instance may decide at `now`. Once False in a term, it stays False in that term."""
        return self.term is not None and now < self._until

    def leads_in(self, term: int, now: float) -> bool:
        """Whether this instance may decide at `now` in `term`."""
        return self.term == term and self.leads(now)

    def tick(self, now: float) -> Ask | None:
        """Return the request to send to the store now; None if none is due."""
        if self.term is not None and not self.leads(now):
            self._lose(now)
        if self._asked is not None or now < self._next_at:
            return None
        ask = self._question(now)
        self._asked, self._next_at = (ask, now), now + self.lease.renew_s
        return ask

    def answered(self, record: LeaderRecord, now: float, *, granted: bool = False) -> None:
        """Apply the row that the store returned. `granted`: the answer is to a `TakeLead` that won."""
        asked = self._end()
        if asked is None:
            return
        ask, asked_at = asked
        self._note(record, now)
        if isinstance(ask, RenewLead) and ask.term == self.term and self.leads(now):
            self._until = asked_at + self.lease.lease_s
        elif isinstance(ask, TakeLead) and granted:
            self.term, self._until, self.followed = record.term, asked_at + self.lease.lease_s, False
        elif self.term is None and self._may_run(now):
            # No other instance holds the row (a lost answer may have granted it to this one), or the leader
            # has timed out. Take the lead at once.
            self._next_at = now

    def refused(self, now: float) -> None:
        """End the request: the store reported a stale term, so another instance leads."""
        self._end()
        self.on_leadership_lost(now)

    def failed(self, now: float) -> None:
        """End the request without an answer. The store may or may not have applied it."""
        self._end()

    def on_leadership_lost(self, now: float) -> None:
        """Give up the lead, because the store refused a request of this term."""
        if self.term is not None:
            self._lose(now)

    def _question(self, now: float) -> Ask:
        if self.term is not None:
            return RenewLead(self.term)
        if self.seen is not None and self._may_run(now):
            return TakeLead(self.seen.term, self.seen.beat)
        return ReadLeader()

    def _may_run(self, now: float) -> bool:
        seen = self.seen
        if seen is None:
            return False
        return seen.holder in (None, self.me) or now - self._seen_at >= self.lease.timeout_s

    def _note(self, record: LeaderRecord, now: float) -> None:
        before = self.seen
        if before is not None and (before.term, before.beat) == (record.term, record.beat):
            return
        same = before is not None and before.term == record.term and record.holder not in (None, self.me)
        self.followed = self.followed or same
        self.seen, self._seen_at = record, now

    def _lose(self, now: float) -> None:
        self.term, self._next_at = None, now

    def _end(self) -> tuple[Ask, float] | None:
        asked, self._asked = self._asked, None
        return asked
