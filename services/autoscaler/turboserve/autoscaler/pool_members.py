"""The members of the pool: their phases, and how many of them are wanted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from turboserve.autoscaler.control.pool_offers import Switch
from turboserve.contracts.fidelity import Tier
from turboserve.contracts.pool import MemberPlayout, PoolMemberPhase
from turboserve.contracts.worker_offers import ServedClasses
from turboserve.contracts.workers import LoadReport

NEXT: dict[PoolMemberPhase, frozenset[PoolMemberPhase]] = {
    PoolMemberPhase.VACANT: frozenset({PoolMemberPhase.RESERVING, PoolMemberPhase.LAUNCHING}),
    PoolMemberPhase.RESERVING: frozenset(
        {PoolMemberPhase.LAUNCHING, PoolMemberPhase.BACKING_OFF, PoolMemberPhase.RELEASING}
    ),
    PoolMemberPhase.LAUNCHING: frozenset(
        {
            PoolMemberPhase.LOADING,
            PoolMemberPhase.READY,
            PoolMemberPhase.RELEASING,
            PoolMemberPhase.BACKING_OFF,
        }
    ),
    PoolMemberPhase.LOADING: frozenset(
        {
            PoolMemberPhase.READY,
            PoolMemberPhase.DRAINING,
            PoolMemberPhase.RELEASING,
            PoolMemberPhase.BACKING_OFF,
        }
    ),
    PoolMemberPhase.READY: frozenset(
        {PoolMemberPhase.DRAINING, PoolMemberPhase.RELEASING, PoolMemberPhase.BACKING_OFF}
    ),
    PoolMemberPhase.DRAINING: frozenset({PoolMemberPhase.RELEASING, PoolMemberPhase.BACKING_OFF}),
    PoolMemberPhase.RELEASING: frozenset(
        {PoolMemberPhase.VACANT, PoolMemberPhase.BACKING_OFF, PoolMemberPhase.DRAINING}
    ),
    PoolMemberPhase.BACKING_OFF: frozenset(
        {PoolMemberPhase.RESERVING, PoolMemberPhase.LAUNCHING, PoolMemberPhase.RELEASING}
    ),
}
"""Phase → phases that may follow it. A worker that could hold sessions is released only from DRAINING, unless
it is dead or the store does not have it. A worker that registers after its release has failed drains."""
STARTING = frozenset(
    {
        PoolMemberPhase.RESERVING,
        PoolMemberPhase.LAUNCHING,
        PoolMemberPhase.LOADING,
        PoolMemberPhase.BACKING_OFF,
    }
)

KEEPABLE = frozenset({*STARTING, PoolMemberPhase.VACANT, PoolMemberPhase.READY})
"""Phases in which an unwanted pool member may become wanted again."""


@dataclass
class PoolMember:
    """State of one pool member. Times are monotonic seconds."""

    name: str
    index: int
    offer: str = ""
    """The offer of which the member's worker is. Empty: the pool has no several offers."""
    phase: PoolMemberPhase = PoolMemberPhase.VACANT
    since: float = 0.0
    reason: str = "new"
    wanted: bool = True
    drain_requested: bool = False
    """Whether the member's worker has been ordered to drain. A drain cannot be canceled."""
    found_draining: bool = False
    """Whether the member's worker drained before this process began."""
    reserved: bool = False
    """Whether the provider holds resources for the member."""
    worker: str | None = None
    pid: int | None = None
    launched_at: float = 0.0
    adopted: bool = False
    """Whether the worker was found running, so that its launch time is not known."""
    ready_at: float | None = None
    listed: bool = False
    """Whether the store has had a row of the worker."""
    declared_gone: bool = False
    """Whether the store no longer has the worker. Its process may still run, or be frozen."""
    up_since: int | None = None
    """Stamp after which the provider lists the worker if it lives; None while the launch is under way."""
    reported_at: float | None = None
    """Time of the worker's last load report; None: there is none."""
    playout: MemberPlayout | None = None
    """By the worker's last load report."""
    capacity: int | None = None
    """K by the worker's row, once it is ready."""
    classes: ServedClasses = None
    """The classes of a worker that serves several, by its row. None: it serves one, or has no row yet."""
    denoised: int | None = None
    """K without the limit of decode workers, by the last load report. 0: none is there. None: it decodes."""
    sessions: int = 0
    suspended: int = 0
    failures: int = 0
    retry_at: float = 0.0
    ticket: int | None = None
    """Ticket of the one command under way for the member."""
    incoming: int = 0
    """Number of sessions that migrate to the worker."""
    drained_since: int | None = None
    """Stamp after which the store places no sessions on the worker; None until the drain is accepted."""
    drain_deadline: float = 0.0
    release_failed: int | None = None
    """Stamp at which the release of a worker that has not drained failed. Before another attempt, the store
    is asked whether the worker has registered meanwhile."""
    waits_for: str | None = None
    """Name of the member whose worker ends and whose place this one's takes. None: it waits for none."""
    replaced: str | None = None
    """Why the worker ends although its member is wanted, such as that it was not ready in time. None: it does
    not."""

    def enter(self, phase: PoolMemberPhase, now: float, reason: str) -> None:
        assert phase in NEXT[self.phase], f"{self.name}: {self.phase} → {phase}"
        self.phase, self.since, self.reason = phase, now, reason

    def occupy(self, worker: str, now: float, *, adopted: bool = False) -> None:
        """Put a new worker into the member."""
        self.adopted, self.found_draining = adopted, False
        self.worker, self.pid, self.up_since, self.reserved = worker, None, None, True
        self.launched_at, self.ready_at, self.reported_at = now, None, None
        self.playout = None
        self.listed, self.drain_requested, self.drained_since = False, False, None
        self.declared_gone, self.replaced, self.release_failed = False, None, None
        self.waits_for = None
        self.capacity = self.denoised = self.classes = None
        self.sessions = self.suspended = self.incoming = 0

    def vacate(self) -> None:
        """Remove the ended worker from the member."""
        self.worker = self.pid = self.up_since = self.ready_at = self.drained_since = self.ticket = None
        self.reported_at = self.playout = self.classes = None
        self.sessions = self.suspended = self.incoming = 0

    def is_up_since(self, ticket: int) -> bool:
        """Whether the worker was running when the request `ticket` was made."""
        return self.up_since is not None and self.up_since < ticket

    def has_vanished(self, ticket: int) -> bool:
        """Whether the store's answer to `ticket` should have the worker's row."""
        return self.listed and self.phase is not PoolMemberPhase.RELEASING and self.is_up_since(ticket)

    def heard(self, report: LoadReport, now: float) -> None:
        """Note a load report of the worker."""
        self.reported_at, self.playout = now, playout_of(report)
        # Without a decode worker, a further worker adds what it decodes itself.
        known = report.decoding
        self.denoised = None if known is None else known.denoised * (known.sessions > 0)

    def capacity_of(self, model: str) -> int | None:
        """n_j of a model as it sizes the pool. None: not known."""
        if self.classes is None:
            return self.own_capacity
        return next((one.capacity for one in self.classes if one.model == model), None)

    def sessions_of(self, model: str) -> int:
        """Number of sessions of a model that hold a slot. A worker of one class has none of others."""
        if self.classes is None:
            return self.sessions
        return sum(one.sessions for one in self.classes if one.model == model)

    def may_hold(self, model: str) -> bool:
        """Whether some of `held` may be of this model of the worker."""
        return self.suspended + self.incoming > 0 or self.sessions_of(model) > 0

    @property
    def own_capacity(self) -> int | None:
        """K as it sizes the pool: a further worker would only divide what decode workers carry."""
        return None if self.capacity is None else max(self.capacity, self.denoised or 0)

    def has_reported(self, since: float) -> bool:
        """Whether the worker has sent a load report after `since`."""
        return self.reported_at is not None and self.reported_at > since

    @property
    def held(self) -> int:
        """Number of sessions that the end of the worker would interrupt."""
        return self.sessions + self.suspended + self.incoming


LARGEST = 4_096
"""Maximum number of workers in one pool."""
_COST = {
    PoolMemberPhase.VACANT: 0,
    PoolMemberPhase.BACKING_OFF: 1,
    PoolMemberPhase.RELEASING: 1,
    PoolMemberPhase.DRAINING: 1,
    PoolMemberPhase.RESERVING: 2,
    PoolMemberPhase.LAUNCHING: 3,
    PoolMemberPhase.LOADING: 4,
}


RESERVED_OFFER = "extra"
"""No offer has this name: members that hold the second worker of another member have it in theirs."""


def member_name(pool: str, offer: str, index: int | str) -> str:
    """Return the name of a pool member. `offer` is empty in a pool that has no several offers."""
    return f"{pool}-{offer}-{index}" if offer else f"{pool}-{index}"


def parts_of(member: str, pool: str) -> tuple[str, int] | None:
    """Return the offer and the index in the name of a member of `pool`; None for any other name."""
    offer, _, number = member.removeprefix(f"{pool}-").rpartition("-")
    if not number.isdigit() or member_name(pool, offer, number) != member:
        return None
    return offer, int(number)


def fit(members: dict[str, PoolMember], target: int, pool: str, now: float, offer: str = "") -> None:
    """Make exactly `target` members of an offer wanted. New members get the lowest free index."""
    ours = [member for member in members.values() if member.offer == offer]
    wanted = [member for member in ours if member.wanted]
    surplus = len(wanted) - target
    if surplus > 0:
        for member in sorted(wanted, key=_least_missed)[:surplus]:
            member.wanted = False
    for _ in range(-surplus):
        again = [s for s in ours if not s.wanted and not s.drain_requested and s.phase in KEEPABLE]
        if again:
            min(again, key=lambda member: member.index).wanted = True
            continue
        index = next(i for i in range(len(members) + 1) if member_name(pool, offer, i) not in members)
        member = PoolMember(member_name(pool, offer, index), index, offer, since=now)
        members[member.name] = member


def switch(
    members: dict[str, PoolMember],
    sizes: Mapping[str, int],
    switches: Iterable[Switch],
    pool: str,
    now: float,
) -> None:
    """Let a new member of one offer wait for the place of one that ends, for each pair of offers.

    A member that ends is chosen as by `fit`. If none ends now, it is one of `_found_draining`, if any.
    """
    known = set(members)
    for before, after in switches:
        stay = [name for name, member in members.items() if member.wanted]
        fit(members, sizes[before], pool, now, before)
        ending = [name for name in stay if not members[name].wanted] or _found_draining(members, before)
        fit(members, sizes[after], pool, now, after)
        new = [one.name for one in members.values() if one.name not in known and one.waits_for is None]
        for name, place in zip((name for name in new if members[name].offer == after), ending, strict=False):
            # The one that ends may wait for the place of another one itself.
            members[name].waits_for = members[place].waits_for or place
            members[name].reason = f"takes the place of {members[name].waits_for} when its worker has ended"


def _found_draining(members: Mapping[str, PoolMember], offer: str) -> list[str]:
    """Return the members of an offer whose workers drained before this process began. None waits for them."""
    awaited = {member.waits_for for member in members.values()}
    found = (name for name, one in members.items() if one.offer == offer and one.found_draining)
    return [name for name in found if not members[name].wanted and name not in awaited]


def end_waits(members: Mapping[str, PoolMember]) -> list[PoolMember]:
    """Let no member wait for a place that is free now, or that is not given up any more. Returns those that
    have waited."""
    found = []
    for member in members.values():
        if member.waits_for is not None:
            place = members.get(member.waits_for)
            if place is None or place.wanted:
                member.waits_for = None
                found.append(member)
    return found


def _least_missed(member: PoolMember) -> tuple[int, int, int]:
    """Sort key of members to give up: first those without a worker, then those with the fewest sessions."""
    return _COST.get(member.phase, 5), member.held, -member.index


def playout_of(report: LoadReport) -> MemberPlayout:
    """Summarize the playout slack of the worker's running sessions."""
    slacks = [held.slack for held in report.sessions if held.slack is not None]
    tiers = Counter(slack.tier for slack in slacks)
    return MemberPlayout(
        slack_s=min((slack.slack_s for slack in slacks), default=None),
        credit_s=min((slack.credit_s for slack in slacks), default=None),
        urgent=tiers[Tier.URGENT],
        normal=tiers[Tier.NORMAL],
        relaxed=tiers[Tier.RELAXED],
        lowered=sum(held.slack is not None and held.fidelity is not None for held in report.sessions),
        quality=report.quality,
        loan=report.loan,
    )
