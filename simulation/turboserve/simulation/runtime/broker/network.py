"""Delays and faults of messages between the clients and the broker."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from turboserve.simulation.runtime.broker.messages import Kind, Message


class TimedClient(Protocol):
    """A client as the network knows it."""

    def loop_time(self) -> float:
        """Return the time of the loop that the broker runs on, in seconds."""


@dataclass(frozen=True)
class MessageOutcome:
    """What happens to one message in one direction."""

    copies: int = 1
    """How often the message arrives; 0 if it is lost."""
    late_s: float | None = None
    """Extra delay, with which the message arrives behind later ones; None if it arrives in its turn."""


LOST = MessageOutcome(copies=0)
DOUBLED = MessageOutcome(copies=2)


class Network:
    """A network without faults: each direction between a client and the broker takes `latency_s`."""

    faulty = False
    """Whether the methods must be called for each message."""
    entries_apart = False
    """Whether stored messages on their way to followers have an order of their own.

    If so, other messages of the connection may overtake them.
    """

    def __init__(self, latency_s: float = 0.0, *, immediate: bool = False) -> None:
        """Create a network.

        Args:
            latency_s: Time of a message in one direction.
            immediate: Whether a message that takes no time is read by its receiver while it is sent. A
                request that the broker answers then ends without a suspension of the client.
        """
        self.latency_s = latency_s
        self.immediate = immediate
        self.at_once = immediate and latency_s == 0.0 and not self.faulty
        """Whether each message is read while it is sent, unless a fault of the broker holds it."""

    def delay(self, client: TimedClient, kind: Kind, to_broker: bool) -> float:
        """Return the seconds for one direction. Messages of one connection and direction keep their order."""
        return self.latency_s

    def fate(
        self, client: TimedClient, kind: Kind, message: Message, to_broker: bool
    ) -> MessageOutcome | None:
        """Return the fault of the message in one direction; None if there is none. Pings have no faults."""
        return None


@dataclass
class Rates:
    """Probabilities per message."""

    delay_s: float = 0.002
    """Mean delay of each message in each direction."""
    lag_s: float = 0.002
    """Mean delay of a stored message to its followers."""
    lost_hint: float = 0.0
    """Loss per receiver, also of stored messages on their way to followers."""
    doubled_hint: float = 0.0
    """Duplication per receiver, of the same messages as `lost_hint`."""
    late_hint: float = 0.0
    """Late arrival behind later messages, of the same messages as `lost_hint`."""
    lost_request: float = 0.0
    """Loss of a request or an append on its way to the broker."""
    lost_answer: float = 0.0
    """Loss of an answer or an acknowledgement on its way to the requester."""
    late_request: float = 0.0
    """Arrival of a request or an append after its sender may have given it up."""
    late_s: float = 2.0
    """Delay of a late request: 0.5 to 2.5 times this."""


class FaultyNetwork(Network):
    """Delays, losses and duplicates at the given rates, drawn from one generator."""

    faulty = True
    entries_apart = True

    def __init__(self, generator: random.Random, rates: Rates) -> None:
        super().__init__(rates.delay_s)
        self.rates = rates
        """May be changed at any time."""
        self._random = generator
        self._muted: dict[TimedClient, float] = {}

    def mute(self, client: TimedClient, until: float) -> None:
        """Drop the acknowledgements of the client's appends until this time of the loop.

        The appends arrive.
        """
        self._muted[client] = until

    def repair(self) -> None:
        """End all faults but the delays."""
        self._muted.clear()
        self.rates = Rates(delay_s=self.rates.delay_s, lag_s=self.rates.lag_s)

    def delay(self, client: TimedClient, kind: Kind, to_broker: bool) -> float:
        mean_s = self.rates.lag_s if kind is Kind.ENTRY else self.rates.delay_s
        return self._random.expovariate(1.0 / mean_s) if mean_s > 0.0 else 0.0

    def fate(
        self, client: TimedClient, kind: Kind, message: Message, to_broker: bool
    ) -> MessageOutcome | None:
        # Each message is drawn for in only one of its directions.
        rates = self.rates
        if to_broker:
            if kind in (Kind.REQUEST, Kind.APPEND):
                if self._happens(rates.lost_request):
                    return LOST
                if self._happens(rates.late_request):
                    return MessageOutcome(late_s=rates.late_s * self._random.uniform(0.5, 2.5))
            elif kind is Kind.ANSWER and self._happens(rates.lost_answer):
                return LOST
            return None
        if kind is Kind.ACK and self._muted and client.loop_time() < self._muted.get(client, 0.0):
            return LOST
        if kind in (Kind.ACK, Kind.API_ANSWER):
            return LOST if self._happens(rates.lost_answer) else None
        if kind in (Kind.HINT, Kind.ENTRY):
            if self._happens(rates.lost_hint):
                return LOST
            if self._happens(rates.doubled_hint):
                return DOUBLED
            if self._happens(rates.late_hint):
                return MessageOutcome(late_s=self._random.expovariate(1.0 / max(rates.delay_s, 1e-6)))
        return None

    def _happens(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability
