"""Who leads among several instances of a service, and what a leader's requests carry."""

from __future__ import annotations

from turboserve.contracts.base import Contract, Count, Id


class LeaderRecord(Contract):
    """The lead of one service: a row without any time in it.

    Whether its holder still leads is judged by those who watch: each sees by its own monotonic clock for how
    long `beat` has not changed. No two machines' clocks are ever compared, and no clock of the store's.
    """

    name: Id
    """The service."""
    holder: Id | None = None
    """The instance that leads; None: nobody has, or the last one has stepped down."""
    term: Count = 0
    """Raised with every change of holder; 0: nobody has led yet."""
    beat: Count = 0
    """Raised with every renewal and every change of holder."""


class GetLeader(Contract):
    """scheduler → state store: the row as it is."""

    name: Id


class Campaign(Contract):
    """scheduler → state store: one compare-and-set that takes the lead under the next term.

    Granted if the row still is as the candidate has seen it (`term` and `beat`), or if nobody holds the lead.
    """

    name: Id
    holder: Id
    term: Count = 0
    beat: Count = 0


class CampaignResult(Contract):
    """The row after a campaign, and whether this very request has taken the lead."""

    record: LeaderRecord
    granted: bool


class KeepLead(Contract):
    """scheduler → state store, every `leader_renew_s`: I still lead. Refused with `stale_term`."""

    name: Id
    holder: Id
    term: Count


class StepDown(KeepLead):
    """scheduler → state store, at an orderly stop: the next one need not wait. Refused with `stale_term`."""


class TermFenced(Contract):
    """Base of requests that only a leader makes.

    The store compares the term inside the transaction of the change, so from a new leader's first moment
    nothing of the old one's is accepted. Refused with `stale_term`.
    """

    term: Count = 0
    """The sender's term; 0: nobody has led yet."""
