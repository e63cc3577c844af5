"""The protocol of loans between the workers of one host, without I/O: events in, commands out.

    home → all usable peers   Ask
    peer → home               Offer (its credit), or Decline
    home → best offer         Accept; the other offers get End
    either → other            End

A worker has one part at a time: it borrows for one session, or lends to one home. A loan changes no owner and
no epoch, so that either side may end it at any time, and a lost message costs at most the loan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from turboserve.worker.sequence_parallel.loan_messages import (
    Accept,
    Ask,
    Asking,
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
    LoanEvent,
    Message,
    Offer,
    Offering,
    PeerJoined,
    PeerLeft,
    Received,
    ReturnDonor,
    Send,
    State,
    StopLending,
)
from turboserve.worker.sequence_parallel.policy import Measured, neediest, releases

ASK_S = 0.3
"""Longest time for which a home waits for offers."""
OFFER_S = 2.0
"""Time for which an offer holds."""
RETRY_S = 1.0
"""Time from a loan or a question without offers to the next question."""
UNUSABLE_S = 30.0
"""Time for which a peer that did not take part in an exchange is not asked."""


class Loans:
    """One worker's part in loans. Pure: time is an argument."""

    def __init__(self) -> None:
        self.state: State = Free()
        self._peers: dict[str, float] = {}
        """Peers with a group. The time from which each may be asked."""
        self._unusable: dict[str, float] = {}
        """The same for peers that are reconnecting."""
        self._measured: Measured | None = None
        self._ask_from = 0.0
        self._last_loan = 0

    def handle(self, event: LoanEvent, now: float) -> list[LoanCommand]:
        """Take one event. Returns the commands, in order."""
        match event:
            case Measured():
                self._measured = event
                return self._judge(now)
            case PeerJoined(peer=peer):
                self._peers[peer] = self._unusable.pop(peer, now)
                return []
            case PeerLeft(peer=peer):
                if self._peers.get(peer, now) > now:
                    self._unusable[peer] = self._peers[peer]
                self._peers.pop(peer, None)
                return self._without(peer, now)
            case Received(peer=peer, message=message):
                return self._received(peer, message, now)
            case LoanBroken(peer=peer, lost=lost):
                if not self._has_loan(peer, event.loan):
                    return []
                if lost and peer in self._peers:
                    self._peers[peer] = now + UNUSABLE_S
                commands = self._without(peer, now)
                return [*commands, DropPeer(peer) if lost else Send(peer, End(event.loan))]
            case _:
                assert_never(event)

    def _judge(self, now: float) -> list[LoanCommand]:
        """What a new measurement changes."""
        measured = self._measured
        assert measured is not None
        match self.state:
            case Free():
                return self._ask(measured, now)
            case Asking(until=until):
                return self._choose(now) if now >= until else []
            case Borrowing(loan=loan, session=session, donor=donor):
                if not releases(measured, session):
                    return []
                return [*self._ended(now, ReturnDonor()), Send(donor, End(loan))]
            case Offering(until=until):
                return self._ended(now) if now >= until else []
            case Lending(home=home, loan=loan):
                if measured.lends:
                    return []
                return [*self._ended(now, StopLending()), Send(home, End(loan))]
            case _:
                assert_never(self.state)

    def _ask(self, measured: Measured, now: float) -> list[LoanCommand]:
        session = neediest(measured)
        usable = sorted(peer for peer, usable_from in self._peers.items() if usable_from <= now)
        if session is None or not usable or now < self._ask_from:
            return []
        self._last_loan += 1
        self.state = Asking(self._last_loan, session, frozenset(usable), (), now + ASK_S)
        return [Send(peer, Ask(self._last_loan)) for peer in usable]

    def _choose(self, now: float) -> list[LoanCommand]:
        """Accept the offer of the most credit, unless the session has recovered meanwhile."""
        asking = self.state
        assert isinstance(asking, Asking)
        offers = sorted(asking.offers, key=lambda offer: (-offer[0], offer[1]))
        wanted = self._measured is not None and not releases(self._measured, asking.session)
        if not offers or not wanted:
            return [*self._ended(now), *(Send(peer, End(asking.loan)) for _, peer in offers)]
        donor = offers[0][1]
        self.state = Borrowing(asking.loan, asking.session, donor)
        return [
            *(Send(peer, End(asking.loan)) for _, peer in offers[1:]),
            Send(donor, Accept(asking.loan)),
            BeginBorrowing(asking.loan, asking.session, donor),
        ]

    def _received(self, peer: str, message: Message, now: float) -> list[LoanCommand]:
        match message:
            case Ask(loan=loan):
                return self._asked(peer, loan, now)
            case Offer(loan=loan, credit_s=credit_s):
                return self._answered(peer, loan, ((credit_s, peer),), now)
            case Decline(loan=loan):
                return self._answered(peer, loan, (), now)
            case Accept(loan=loan):
                offered = isinstance(self.state, Offering) and self._has_loan(peer, loan)
                if not offered:
                    return [Send(peer, End(loan))]
                if self._measured is None or not self._measured.lends:
                    return [*self._ended(now), Send(peer, End(loan))]
                self.state = Lending(peer, loan)
                return [BeginLending(loan, peer)]
            case End(loan=loan):
                return self._without(peer, now) if self._has_loan(peer, loan) else []
            case _:
                assert_never(message)

    def _asked(self, peer: str, loan: int, now: float) -> list[LoanCommand]:
        # The home asks again only after its last question is over.
        free = isinstance(self.state, Free) or (isinstance(self.state, Offering) and self.state.home == peer)
        measured = self._measured
        if not free or measured is None or not measured.lends:
            return [Send(peer, Decline(loan))]
        self.state = Offering(peer, loan, now + OFFER_S)
        return [Send(peer, Offer(loan, measured.least_credit_s))]

    def _answered(
        self, peer: str, loan: int, offers: tuple[tuple[float, str], ...], now: float
    ) -> list[LoanCommand]:
        asking = self.state
        if not isinstance(asking, Asking) or asking.loan != loan or peer not in asking.waiting:
            return [Send(peer, End(loan))] if offers else []
        left = asking.waiting - {peer}
        self.state = replace(asking, waiting=left, offers=asking.offers + offers)
        return [] if left else self._choose(now)

    def _has_loan(self, peer: str, loan: int) -> bool:
        """Whether this loan with this peer is the present one."""
        match self.state:
            case Borrowing(donor=other) | Offering(home=other) | Lending(home=other):
                return (other, self.state.loan) == (peer, loan)
            case Asking():
                return self.state.loan == loan
            case Free():
                return False
            case _:
                assert_never(self.state)

    def _without(self, peer: str, now: float) -> list[LoanCommand]:
        """The peer takes no part any more."""
        match self.state:
            case Borrowing(donor=other) if other == peer:
                return self._ended(now, ReturnDonor())
            case Lending(home=other) if other == peer:
                return self._ended(now, StopLending())
            case Offering(home=other) if other == peer:
                return self._ended(now)
            case Asking():
                offers = tuple(offer for offer in self.state.offers if offer[1] != peer)
                left = self.state.waiting - {peer}
                self.state = replace(self.state, waiting=left, offers=offers)
                return [] if left else self._choose(now)
        return []

    def _ended(self, now: float, *commands: LoanCommand) -> list[LoanCommand]:
        self.state, self._ask_from = Free(), now + RETRY_S
        return list(commands)
