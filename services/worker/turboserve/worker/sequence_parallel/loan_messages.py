"""Messages, states, events and commands of the protocol of loans. See `loans`."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.worker.sequence_parallel.policy import Measured

# Messages. A loan's number is unique for its home.


@dataclass(frozen=True)
class Ask:
    """home → peer: the home has a session in deficit."""

    loan: int


@dataclass(frozen=True)
class Offer:
    """peer → home: the peer lends."""

    loan: int
    credit_s: float


@dataclass(frozen=True)
class Decline:
    """peer → home: the peer does not lend now."""

    loan: int


@dataclass(frozen=True)
class Accept:
    """home → peer: the loan begins. Forwards may follow."""

    loan: int


@dataclass(frozen=True)
class End:
    """Either direction: the loan, or the offer, is over."""

    loan: int


Message = Ask | Offer | Decline | Accept | End


# States


@dataclass(frozen=True)
class Free:
    """No loan."""


@dataclass(frozen=True)
class Asking:
    """At the home: peers are asked."""

    loan: int
    session: str
    waiting: frozenset[str]
    """Peers that have not answered."""
    offers: tuple[tuple[float, str], ...]
    """Credit and peer."""
    until: float


@dataclass(frozen=True)
class Borrowing:
    """At the home: a donor computes half of the session's forwards."""

    loan: int
    session: str
    donor: str


@dataclass(frozen=True)
class Offering:
    """At the donor: an offer holds."""

    home: str
    loan: int
    until: float


@dataclass(frozen=True)
class Lending:
    """At the donor: the loan has begun."""

    home: str
    loan: int


State = Free | Asking | Borrowing | Offering | Lending


# Events beside `Measured`


@dataclass(frozen=True)
class PeerJoined:
    """A group with this peer is ready."""

    peer: str


@dataclass(frozen=True)
class PeerLeft:
    """The connection to the peer is closed."""

    peer: str


@dataclass(frozen=True)
class Received:
    """A peer's message."""

    peer: str
    message: Message


@dataclass(frozen=True)
class LoanBroken:
    """A forward of a loan did not take place as agreed."""

    peer: str
    loan: int
    lost: bool
    """Whether the peer did not take part in an exchange; otherwise it declined."""


LoanEvent = Measured | PeerJoined | PeerLeft | Received | LoanBroken


# Commands


@dataclass(frozen=True)
class Send:
    """Send a message."""

    peer: str
    message: Message


@dataclass(frozen=True)
class BeginBorrowing:
    """Split the session's forwards with the donor from the next one on."""

    loan: int
    session: str
    donor: str


@dataclass(frozen=True)
class ReturnDonor:
    """Compute every forward alone from now on."""


@dataclass(frozen=True)
class BeginLending:
    """Compute this worker's half of the forwards that the home announces."""

    loan: int
    home: str


@dataclass(frozen=True)
class StopLending:
    """Decline every further forward."""


@dataclass(frozen=True)
class DropPeer:
    """Close the connection to the peer and its group."""

    peer: str


LoanCommand = Send | BeginBorrowing | ReturnDonor | BeginLending | StopLending | DropPeer
