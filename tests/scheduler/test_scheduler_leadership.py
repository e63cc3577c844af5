"""The lead of several schedulers: rules one by one, then under delays, losses, pauses, crashes and skew.

The store is the real one's core. Its answers and the schedulers' commands are delayed, lost and reordered.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from turboserve.contracts.errors import StaleTermError
from turboserve.contracts.leading import Campaign, KeepLead, LeaderRecord
from turboserve.leadership import Ask, Leadership, Lease, ReadLeader, RenewLead, TakeLead
from turboserve.state_store.core import leading as store_rules
from turboserve.state_store.core.change import expect_term

LEASE = Lease(renew_s=0.5, lease_s=2.5, timeout_s=3.5)


class Row:
    """The store's row, and the requests that it has accepted, in order."""

    def __init__(self) -> None:
        self.record = LeaderRecord(name="scheduler")
        self.accepted: list[tuple[int, str]] = []

    def ask(self, me: str, ask: Ask) -> tuple[LeaderRecord, bool]:
        granted = False
        match ask:
            case TakeLead(term, beat):
                request = Campaign(name="scheduler", holder=me, term=term, beat=beat)
                after = store_rules.campaign(self.record, request)
                granted = after is not None
                self.record = after or self.record
            case RenewLead(term):
                keep = KeepLead(name="scheduler", holder=me, term=term)
                self.record = store_rules.keep(self.record, keep)
        return self.record, granted

    def command(self, me: str, term: int) -> None:
        expect_term(self.record, term)
        self.accepted.append((term, me))


def led(me: str = "a", row: Row | None = None, now: float = 0.0) -> tuple[Leadership, Row]:
    """Return a leadership that leads since its request at `now`, and its row."""
    row, leadership = row or Row(), Leadership(me, LEASE)
    for expected in (ReadLeader, TakeLead):
        ask = leadership.tick(now)
        assert isinstance(ask, expected)
        record, granted = row.ask(me, ask)
        leadership.answered(record, now, granted=granted)
    assert leadership.leads(now)
    return leadership, row


def test_the_first_leads_at_once_and_renews() -> None:
    leadership, row = led()
    assert leadership.term == 1
    assert leadership.tick(0.4) is None
    ask = leadership.tick(0.5)
    assert ask == RenewLead(1)
    leadership.answered(row.ask("a", ask)[0], 0.9)
    # The lease counts from the request, not from the answer.
    assert leadership.leads(2.9)
    assert not leadership.leads(3.0)


def test_a_standby_waits_for_the_silence_it_has_seen_itself() -> None:
    _, row = led()
    standby = Leadership("b", LEASE)
    now = 100.0
    while not isinstance(ask := standby.tick(now), TakeLead):
        if ask is not None:
            standby.answered(row.ask("b", ask)[0], now + 0.1)
        now += 0.05
    assert 103.55 <= now < 104.2
    assert not standby.followed
    record, granted = row.ask("b", ask)
    standby.answered(record, now, granted=granted)
    assert standby.leads(now)
    assert standby.term == 2


def test_a_standby_that_has_seen_renewals_says_that_it_follows() -> None:
    leadership, row = led()
    standby = Leadership("b", LEASE)
    for now in (0.0, 1.0):
        ask = standby.tick(now)
        assert ask is not None
        standby.answered(row.ask("b", ask)[0], now)
        assert standby.followed == (now == 1.0)
        keep = leadership.tick(now + 0.5)
        assert keep is not None
        leadership.answered(row.ask("a", keep)[0], now + 0.5)


def test_a_lease_that_ended_is_not_brought_back_by_a_late_answer() -> None:
    """Its events were dropped meanwhile, so the term's view is no longer valid."""
    leadership, row = led()
    ask = leadership.tick(2.4)
    assert ask == RenewLead(1)
    record, _ = row.ask("a", ask)
    leadership.answered(record, 2.6)
    assert not leadership.leads(2.6)
    # The row is still its own, so it need not wait, and gets a new term.
    ask = leadership.tick(2.6)
    assert isinstance(ask, TakeLead)
    record, granted = row.ask("a", ask)
    leadership.answered(record, 2.7, granted=granted)
    assert (leadership.term, leadership.leads(2.7)) == (2, True)


def test_a_campaign_whose_answer_was_lost_is_run_again() -> None:
    row, leadership = Row(), Leadership("a", LEASE)
    look = leadership.tick(0.0)
    assert look is not None
    leadership.answered(row.ask("a", look)[0], 0.0)
    run = leadership.tick(0.0)
    assert run is not None
    row.ask("a", run)
    leadership.failed(1.0)
    again = leadership.tick(1.0)
    assert again is not None
    record, granted = row.ask("a", again)
    assert (record.holder, granted) == ("a", False)
    leadership.answered(record, 1.0, granted=granted)
    assert not leadership.leads(1.0), "the row may be older than this question"
    once_more = leadership.tick(1.0)
    assert once_more == TakeLead(record.term, record.beat)


def test_deposed_by_the_store_it_stops_at_once() -> None:
    leadership, _ = led()
    leadership.on_leadership_lost(0.1)
    assert not leadership.leads(0.1)
    assert isinstance(leadership.tick(0.1), TakeLead | ReadLeader)


def test_times_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="leader_lease_s: 4 is not between"):
        Lease(renew_s=0.5, lease_s=4.0, timeout_s=3.5)


@dataclass
class Process:
    """One scheduler process: its own clock, and whether it runs at the moment."""

    name: str
    skew_s: float
    core: Leadership
    stopped_until: float = 0.0
    alive: bool = True
    waiting: list[Callable[[], None]] = field(default_factory=list)


class World:
    """Virtual time, one row, several processes. The seed determines every random choice."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.row = Row()
        self.store_away_until = 0.0
        self.processes: list[Process] = []
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.calm = False
        self.most_leaders = 0
        for _ in range(self.random.randint(2, 4)):
            self.start()

    def start(self) -> None:
        self.count += 1
        name = f"s{self.count}"
        skew = self.random.uniform(-1e4, 1e4)
        self.processes.append(Process(name, skew, Leadership(name, LEASE)))

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay_s, self.count, work))

    def delay(self) -> float:
        bad = not self.calm and self.random.random() < 0.15
        return self.random.uniform(0.0, 6.0) if bad else self.random.uniform(0.001, 0.05)

    def lost(self) -> bool:
        return not self.calm and self.random.random() < 0.08

    def deliver(self, process: Process, work: Callable[[], None]) -> None:
        """Deliver to a process once it runs again, unless it was killed."""
        if not process.alive:
            return
        if self.now < process.stopped_until:
            process.waiting.append(work)
        else:
            work()

    def turn(self, process: Process) -> None:
        """Do one round of the shell: a request if one is due, a command if it leads."""
        local, core = self.now + process.skew_s, process.core
        ask = core.tick(local)
        if ask is not None:
            self.send(process, ask)
        if core.leads(local):
            term = core.term
            assert term is not None
            # From the check to the store it may take any time: the process may even be stopped in between.
            self.later(self.delay(), lambda: self.command(process, term))

    def command(self, process: Process, term: int) -> None:
        if self.now < self.store_away_until:
            return
        try:
            self.row.command(process.name, term)
        except StaleTermError:
            self.deliver(process, lambda: process.core.on_leadership_lost(self.now + process.skew_s))

    def send(self, process: Process, ask: Ask) -> None:
        ended: list[bool] = []

        def end(work: Callable[[float], None]) -> None:
            if not ended:
                ended.append(True)
                self.deliver(process, lambda: work(self.now + process.skew_s))

        def at_store() -> None:
            if self.now < self.store_away_until:
                return
            try:
                record, granted = self.row.ask(process.name, ask)
            except StaleTermError:
                self.later(self.delay(), lambda: end(process.core.refused))
                return
            if not self.lost():
                answer = lambda now: process.core.answered(record, now, granted=granted)  # noqa: E731
                self.later(self.delay(), lambda: end(answer))

        if not self.lost():
            self.later(self.delay(), at_store)
        self.later(LEASE.lease_s / 2, lambda: end(process.core.failed))

    def disturb(self) -> None:
        alive = [process for process in self.processes if process.alive]
        victim = self.random.choice(alive)
        match self.random.randrange(4):
            case 0:
                victim.alive = False
                self.start()
            case 1:
                victim.stopped_until = self.now + self.random.uniform(0.5, 15.0)
            case 2:
                self.store_away_until = self.now + self.random.uniform(0.5, 8.0)
            case _:
                leaders = [p for p in alive if p.core.leads(self.now + p.skew_s)]
                for leader in leaders:
                    leader.stopped_until = self.now + self.random.uniform(2.0, 8.0)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = round(self.now + 0.05, 6)
            while self.queue and self.queue[0][0] <= self.now:
                heapq.heappop(self.queue)[2]()
            for process in self.processes:
                if process.alive and self.now >= process.stopped_until:
                    waiting, process.waiting = process.waiting, []
                    for work in waiting:
                        work()
                    self.turn(process)
            # A stopped process decides nothing. What counts is what it would do when it continues.
            leaders = [p for p in self.processes if p.alive and p.core.leads(self.now + p.skew_s)]
            self.most_leaders = max(self.most_leaders, len(leaders))
            if not self.calm and self.random.random() < 0.02:
                self.disturb()


@pytest.mark.parametrize("block", range(4))
def test_never_two_leaders_whatever_happens(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        world = World(seed)
        world.run(60.0)
        world.calm = True
        for process in world.processes:
            process.stopped_until = 0.0
        world.store_away_until = 0.0
        world.run(15.0)
        assert world.most_leaders <= 1, f"seed {seed}: two leases at one moment"
        terms = [term for term, _ in world.row.accepted]
        assert terms == sorted(terms), f"seed {seed}: a command of an old term was accepted"
        owners = {term: {who for t, who in world.row.accepted if t == term} for term in set(terms)}
        assert all(len(who) == 1 for who in owners.values()), f"seed {seed}: a term had two leaders"
        leaders = [p for p in world.processes if p.alive and p.core.leads(world.now + p.skew_s)]
        assert len(leaders) == 1, f"seed {seed}: nobody leads although all is calm"


def test_the_simulation_does_change_leaders() -> None:
    world = World(7)
    world.run(60.0)
    assert world.row.record.term >= 4
    assert len({who for _, who in world.row.accepted}) >= 2
