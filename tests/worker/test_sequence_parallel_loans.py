"""The protocol of loans on its own: any history of messages, measurements and broken connections."""

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turboserve.worker.engine.playout import Playout
from turboserve.worker.sequence_parallel.loan_messages import (
    Accept,
    Ask,
    BeginBorrowing,
    BeginLending,
    Borrowing,
    Decline,
    DropPeer,
    End,
    Free,
    Lending,
    LoanBroken,
    LoanCommand,
    Message,
    Offer,
    Offering,
    PeerJoined,
    PeerLeft,
    Received,
    ReturnDonor,
    Send,
    StopLending,
)
from turboserve.worker.sequence_parallel.loans import ASK_S, OFFER_S, RETRY_S, UNUSABLE_S, Loans
from turboserve.worker.sequence_parallel.policy import (
    MOST_CREDIT_S,
    Measured,
    may_lend,
    measure,
    neediest,
    releases,
)

RELAXED = Measured({}, True, 3.0)
POOR = Measured({"s": (-0.5, 0.2)}, False, -0.5)


def of(credit_s: float, next_s: float = 0.2, *, playing: bool = True) -> Playout:
    return Playout(credit_s + next_s, 0.0, next_s, playing=playing)


def test_the_neediest_session_borrows_only_below_zero_and_returns_at_twice_its_chunk() -> None:
    found = measure({"a": of(0.1), "b": of(-0.2), "c": of(-0.4)}, ["a", "b"], 0.5)
    assert neediest(found) == "b"
    assert found.least_credit_s == pytest.approx(-0.4)
    assert neediest(measure({"a": of(0.0)}, ["a"], 0.5)) is None
    assert not releases(found, "a")
    assert releases(measure({"a": of(0.4)}, ["a"], 0.5), "a")
    assert releases(found, "gone")
    # The slack of a viewer who pauses does not shrink: no stall comes.
    assert neediest(measure({"a": of(-1.0, playing=False)}, ["a"], 0.5)) is None


def test_a_worker_lends_only_while_all_sessions_are_relaxed_and_outlast_an_exchange() -> None:
    assert may_lend([], 0.5)
    assert may_lend([of(1.0), of(2.0)], 0.5)
    assert not may_lend([of(1.0), of(0.7)], 0.5), "0.7 is not above 4 T"
    assert not may_lend([of(1.0)], 1.5), "a frozen home would cost 1.5 s"
    assert measure({"a": of(0.0, playing=False)}, [], 0.5).lends
    assert measure({}, [], 0.5).least_credit_s == MOST_CREDIT_S


class Host:
    """Workers with ordered connections between each two."""

    def __init__(self, count: int = 3) -> None:
        self.names = [f"wrk_{i}" for i in range(count)]
        self.loans = {name: Loans() for name in self.names}
        self.queues: dict[tuple[str, str], deque[Message]] = {}
        self.now = 0.0
        self.engines: dict[str, LoanCommand | None] = dict.fromkeys(self.names)
        """What each engine does now: `BeginBorrowing`, `BeginLending` or nothing."""
        for one in self.names:
            for other in self.names:
                if one < other:
                    self.connect(one, other)

    def connect(self, one: str, other: str) -> None:
        for source, target in ((one, other), (other, one)):
            self.queues[source, target] = deque()
            self.handle(source, PeerJoined(target))

    def disconnect(self, one: str, other: str) -> None:
        if (one, other) in self.queues:
            for source, target in ((one, other), (other, one)):
                del self.queues[source, target]
            for source, target in ((one, other), (other, one)):
                self.handle(source, PeerLeft(target))

    def handle(self, name: str, event: Any) -> list[LoanCommand]:
        commands = self.loans[name].handle(event, self.now)
        for command in commands:
            match command:
                case Send(peer=peer, message=message):
                    if (name, peer) in self.queues:
                        self.queues[name, peer].append(message)
                case BeginBorrowing() | BeginLending():
                    assert self.engines[name] is None, "a worker has one loan at a time"
                    self.engines[name] = command
                case ReturnDonor():
                    assert isinstance(self.engines[name], BeginBorrowing)
                    self.engines[name] = None
                case StopLending():
                    assert isinstance(self.engines[name], BeginLending)
                    self.engines[name] = None
                case DropPeer(peer=peer):
                    self.disconnect(name, peer)
        return commands

    def deliver(self, source: str, target: str) -> bool:
        queue = self.queues.get((source, target))
        if not queue:
            return False
        self.handle(target, Received(source, queue.popleft()))
        return True

    def settle(self) -> None:
        while any(self.deliver(*pair) for pair in list(self.queues)):
            pass

    def check(self) -> None:
        """The engines do what the states say."""
        for name, loans in self.loans.items():
            state, engine = loans.state, self.engines[name]
            match state:
                case Borrowing():
                    assert engine == BeginBorrowing(state.loan, state.session, state.donor)
                case Lending():
                    assert engine == BeginLending(state.loan, state.home)
                case _:
                    assert engine is None

    def matched(self) -> None:
        """With no message under way, every loan has both sides."""
        for name, loans in self.loans.items():
            match loans.state:
                case Borrowing(loan=loan, donor=donor):
                    assert self.loans[donor].state == Lending(name, loan)
                case Lending(home=home, loan=loan):
                    state = self.loans[home].state
                    assert isinstance(state, Borrowing)
                    assert (state.loan, state.donor) == (loan, name)


def test_a_home_borrows_the_peer_of_the_most_credit_and_returns_it() -> None:
    host = Host()
    host.handle("wrk_1", Measured({}, True, 2.0))
    host.handle("wrk_2", Measured({}, True, 5.0))
    sent = host.handle("wrk_0", POOR)
    assert sent == [Send("wrk_1", Ask(1)), Send("wrk_2", Ask(1))]
    host.settle()
    assert host.engines == {
        "wrk_0": BeginBorrowing(1, "s", "wrk_2"),
        "wrk_1": None,
        "wrk_2": BeginLending(1, "wrk_0"),
    }
    host.check()
    host.matched()
    assert host.handle("wrk_0", Measured({"s": (0.3, 0.2)}, False, 0.3)) == []
    host.handle("wrk_0", Measured({"s": (0.4, 0.2)}, False, 0.4))
    host.settle()
    assert [*host.engines.values()] == [None, None, None]
    assert all(isinstance(loans.state, Free) for loans in host.loans.values())


def test_a_donor_whose_session_is_not_relaxed_ends_the_loan() -> None:
    host = Host(2)
    host.handle("wrk_1", RELAXED)
    host.handle("wrk_0", POOR)
    host.settle()
    assert host.handle("wrk_1", POOR) == [StopLending(), Send("wrk_0", End(1))]
    host.settle()
    assert host.engines["wrk_0"] is None
    # Both are in deficit now: each declines the other's question.
    host.now += RETRY_S
    host.handle("wrk_0", POOR)
    host.handle("wrk_1", POOR)
    host.settle()
    assert [*host.engines.values()] == [None, None]


def test_a_peer_that_is_not_relaxed_declines_and_is_asked_again_later() -> None:
    host = Host(2)
    host.handle("wrk_1", POOR)
    host.queues["wrk_1", "wrk_0"].clear()
    assert host.loans["wrk_1"].handle(Received("wrk_0", Ask(9)), 0.0) == [Send("wrk_0", Decline(9))]
    host.now += 2 * RETRY_S
    host.handle("wrk_1", Measured({}, False, 0.1))
    host.handle("wrk_0", POOR)
    host.settle()
    assert isinstance(host.loans["wrk_0"].state, Free)
    assert host.handle("wrk_0", POOR) == []
    host.now += RETRY_S
    assert host.handle("wrk_0", POOR) == [Send("wrk_1", Ask(2))]


def test_an_offer_expires_and_a_late_accept_is_refused() -> None:
    host = Host(2)
    host.handle("wrk_1", RELAXED)
    host.handle("wrk_1", Received("wrk_0", Ask(4)))
    assert isinstance(host.loans["wrk_1"].state, Offering)
    host.now += OFFER_S
    host.handle("wrk_1", RELAXED)
    assert isinstance(host.loans["wrk_1"].state, Free)
    assert host.handle("wrk_1", Received("wrk_0", Accept(4))) == [Send("wrk_0", End(4))]


def test_a_home_does_not_wait_for_a_peer_that_does_not_answer() -> None:
    host = Host()
    for name in ("wrk_1", "wrk_2"):
        host.handle(name, RELAXED)
    host.handle("wrk_0", POOR)
    host.deliver("wrk_0", "wrk_1")
    host.deliver("wrk_1", "wrk_0")
    assert not any(host.engines.values())
    host.now += ASK_S
    host.handle("wrk_0", POOR)
    assert host.engines["wrk_0"] == BeginBorrowing(1, "s", "wrk_1")
    # The late offer is turned down.
    host.settle()
    host.matched()
    assert isinstance(host.loans["wrk_2"].state, Free)


def test_a_lost_donor_is_not_asked_for_a_while_also_after_it_reconnects() -> None:
    host = Host(2)
    host.handle("wrk_1", RELAXED)
    host.handle("wrk_0", POOR)
    host.settle()
    commands = host.handle("wrk_0", LoanBroken("wrk_1", 1, lost=True))
    assert commands == [ReturnDonor(), DropPeer("wrk_1")]
    assert host.engines == {"wrk_0": None, "wrk_1": None}
    host.connect("wrk_0", "wrk_1")
    host.now += UNUSABLE_S - 0.1
    assert host.handle("wrk_0", POOR) == []
    host.now += 0.2
    assert host.handle("wrk_0", POOR) == [Send("wrk_1", Ask(2))]


def test_a_donor_that_declines_a_forward_keeps_its_connection() -> None:
    host = Host(2)
    host.handle("wrk_1", RELAXED)
    host.handle("wrk_0", POOR)
    host.settle()
    commands = host.handle("wrk_0", LoanBroken("wrk_1", 1, lost=False))
    assert commands == [ReturnDonor(), Send("wrk_1", End(1))]
    host.settle()
    assert isinstance(host.loans["wrk_1"].state, Free)
    # An error of a loan that is over changes nothing.
    assert host.handle("wrk_0", LoanBroken("wrk_1", 1, lost=True)) == []


def test_an_accepted_offer_is_not_kept_if_the_donor_is_not_relaxed_any_more() -> None:
    host = Host(2)
    host.handle("wrk_1", RELAXED)
    host.handle("wrk_1", Received("wrk_0", Ask(1)))
    host.handle("wrk_1", Measured({}, False, 0.1))
    assert Send("wrk_0", End(1)) in host.handle("wrk_1", Received("wrk_0", Accept(1)))
    assert host.engines["wrk_1"] is None
    assert Offer(1, 3.0) in host.queues["wrk_1", "wrk_0"]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_any_history_ends_with_both_sides_agreed_and_then_free(seed: int) -> None:
    random_ = random.Random(seed)
    host = Host(random_.choice((2, 3, 4)))
    for _ in range(random_.randrange(10, 150)):
        host.now += random_.choice((0.0, 0.01, 0.2, 1.0))
        one, other = random_.sample(host.names, 2)
        match random_.randrange(12):
            case 0 | 1 | 2:
                credit_s = random_.uniform(-1, 2)
                own = random_.random() < 0.7
                sessions = {"s": (credit_s, 0.2)} if own else {}
                host.handle(one, Measured(sessions, not own or credit_s > 0.8, credit_s if own else 3600.0))
            case 3:
                host.disconnect(one, other)
            case 4:
                if (one, other) not in host.queues:
                    host.connect(one, other)
            case 5:
                state = host.loans[one].state
                if isinstance(state, Borrowing):
                    lost = random_.random() < 0.5
                    host.handle(one, LoanBroken(state.donor, state.loan, lost=lost))
            case _:
                host.deliver(one, other)
        host.check()
    host.settle()
    host.check()
    host.matched()
    for _ in range(3):
        host.now += OFFER_S
        for name in host.names:
            host.handle(name, RELAXED)
        host.settle()
    assert all(isinstance(loans.state, Free) for loans in host.loans.values())
    host.check()
