"""Latencies and faults of the servers. One seeded generator draws every choice."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum


class CommitOutcome(Enum):
    """What becomes of a commit."""

    DONE = "done"
    ANSWER_LOST = "answer lost"
    """It is committed, and its client gets an error."""
    REQUEST_LOST = "request lost"
    """It is rolled back, and its client gets an error."""


@dataclass
class PostgresBehavior:
    """Latencies and faults of Postgres. Fields may change during a run."""

    random: random.Random = field(default_factory=lambda: random.Random(0))
    statement_s: float = 0.0
    """Time of one round trip: the mean of an exponential distribution if `varied`."""
    varied: bool = True
    at_commit: bool = False
    """Whether the statements of a transaction take their time together, at its commit. Each of them is then
    executed while it is sent, and its client is not suspended."""
    in_doubt: float = 0.0
    """Probability that a commit's connection breaks. Half of these commits take effect."""
    refused_updates: float = 0.5
    """Probability that an update fails on a full disk. Inserts always fail."""
    unflushed_s: float = 0.6
    """Maximum age of the commits that a crash reverts: three times `wal_writer_delay`.

    Only commits that did not wait for the disk can be reverted.
    """

    def delay_s(self) -> float:
        """Return the time of one round trip."""
        if self.statement_s <= 0.0 or not self.varied:
            return self.statement_s
        return self.random.expovariate(1.0 / self.statement_s)

    def commit(self) -> CommitOutcome:
        """Draw the outcome of the next commit."""
        if self.in_doubt <= 0.0 or self.random.random() >= self.in_doubt:
            return CommitOutcome.DONE
        return self.random.choice((CommitOutcome.ANSWER_LOST, CommitOutcome.REQUEST_LOST))

    def refuses_update(self) -> bool:
        """Draw whether the next update fails on a full disk."""
        return self.random.random() < self.refused_updates

    def lost(self, unflushed: int) -> int:
        """Draw how many of the newest `unflushed` commits a crash reverts."""
        return self.random.randint(0, unflushed)
