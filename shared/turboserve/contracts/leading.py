"""Leader election among the instances of a service, and the term that a leader's requests carry."""

from __future__ import annotations

from turboserve.contracts.base import Contract, Count, Id

POOL_LEADER = "autoscaler-"
"""Beginning of the names of pools' leaders."""


def pool_leader(pool: str) -> str:
    """Return the name of the row of a pool's leader, among the autoscalers that share the pool."""
    return f"{POOL_LEADER}{pool}"


class LeaderRecord(Contract):
    """The row that names the leader of one service. The row contains no time.

    Each candidate judges whether the holder still leads: it measures with its own monotonic clock how long
    `beat` has not changed. The clocks of two machines are never compared, and the store's clock is not used.
    """

    name: Id
    """The service; for autoscalers, see `pool_leader`."""
    holder: Id | None = None
    """The leading instance. None: no instance has led yet, or the last leader has stepped down."""
    term: Count = 0
    """Raised with every change of holder. 0: no instance has led yet."""
    beat: Count = 0
    """Raised with every renewal and every change of holder."""


class GetLeader(Contract):
    """scheduler, autoscaler → state store: read the row. Answered with `LeaderRecord`."""

    name: Id


class Campaign(Contract):
    """scheduler, autoscaler → state store: one compare-and-set that takes the lead under the next term.

    Granted if the row still has the `term` and `beat` that the candidate has read, or if it has no holder.
    """

    name: Id
    holder: Id
    term: Count = 0
    beat: Count = 0


class CampaignResult(Contract):
    """The row after a campaign, and whether this request has taken the lead."""

    record: LeaderRecord
    granted: bool


class KeepLead(Contract):
    """scheduler, autoscaler → state store, every `leader_renew_s`: the leader renews.

    Refused with `stale_term`.
    """

    name: Id
    holder: Id
    term: Count


class StepDown(KeepLead):
    """scheduler, autoscaler → state store, at an orderly stop: give up the lead at once.

    Refused with `stale_term`.
    """


class TermFenced(Contract):
    """Base of requests that only a leader makes.

    The store compares the term inside the transaction of the change. As soon as a new leader has its term,
    every request of the former leader is therefore refused with `stale_term`.
    """

    term: Count = 0
    """The sender's term. 0: no instance has led yet."""


class PoolFenced(Contract):
    """Base of requests by which an autoscaler changes workers.

    If several autoscalers share a pool, only the leader's requests are accepted, as with `TermFenced`.
    """

    pool: Id | None = None
    """Pool of the autoscaler that sends this, if several share it. None: no other shares it."""
    pool_term: Count | None = None
    """The term of the pool's leader. Refused with `stale_term`."""
