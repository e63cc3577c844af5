"""Who of several schedulers leads: a pure core, told the time and what the store answers.

The store's row has no time in it. A leader counts its lease from the moment at which it *asked* for the
renewal; a candidate counts the silence from the moment at which it *heard* of the row as it still is. The
store's own moment lies between the two, so the lease of the old leader has ended before a candidate's wait
has, by monotonic clocks of which none is ever compared with another. And if a clock or a process stands
still, the term decides: the store takes nothing from a leader whose term is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from turboserve.contracts.leading import LeaderRecord


@dataclass(frozen=True)
class Lease:
    """All in seconds."""

    renew_s: float = 0.5
    """The leader renews, and the others look, this often."""
    lease_s: float = 4.0
    """A leader that asked for its last good renewal longer ago decides nothing any more."""
    timeout_s: float = 5.0
    """A leader whose row has not changed for this long may be replaced; more than the lease, by a margin."""

    def __post_init__(self) -> None:
        if not self.renew_s < self.lease_s < self.timeout_s:
            raise ValueError(
                f"leader_lease_s: {self.lease_s:g} is not between leader_renew_s ({self.renew_s:g}) "
                f"and leader_timeout_s ({self.timeout_s:g})"
            )


@dataclass(frozen=True)
class ReadLeader:
    """Read the row."""


@dataclass(frozen=True)
class TakeLead:
    """Take the lead if the row still has this term and beat, or no holder."""

    term: int
    beat: int


@dataclass(frozen=True)
class RenewLead:
    """Renew in this term."""

    term: int


Ask = ReadLeader | TakeLead | RenewLead


class Leadership:
    """One instance's part.

    One question at a time: `tick` asks it, and `answered`, `refused` or `failed` ends it.
    """

    def __init__(self, me: str, lease: Lease | None = None) -> None:
        self.me = me
        self.lease = lease or Lease()
        self.seen: LeaderRecord | None = None
        """The row as it was last heard of."""
        self.followed = False
        """Whether another's renewals have been seen: the lead is in good hands, and this is a standby."""
        self.term: int | None = None
        """The term in which this instance leads, or led until just now. Never the same one twice."""
        self._until = 0.0
        self._seen_at = 0.0
        self._next_at = -math.inf
        self._asked: tuple[Ask, float] | None = None

    def leads(self, now: float) -> bool:
        """Whether it may decide at `now`. Once False in a term, it stays False in that term."""
        return self.term is not None and now < self._until

    def tick(self, now: float) -> Ask | None:
        """What to ask the store now; None: nothing yet."""
        if self.term is not None and not self.leads(now):
            self._lose(now)
        if self._asked is not None or now < self._next_at:
            return None
        ask = self._question(now)
        self._asked, self._next_at = (ask, now), now + self.lease.renew_s
        return ask

    def answered(self, record: LeaderRecord, now: float, *, granted: bool = False) -> None:
        """The row; `granted` for a `TakeLead` that this very request won."""
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
            # Its own row, of a request whose answer was lost, or a row that nobody holds: no need to wait.
            self._next_at = now

    def refused(self, now: float) -> None:
        """The question was answered with a stale term: another one leads."""
        self._end()
        self.on_leadership_lost(now)

    def failed(self, now: float) -> None:
        """The question was not answered: whether the store took it is not known."""
        self._end()

    def on_leadership_lost(self, now: float) -> None:
        """The store refused something because of the term."""
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
