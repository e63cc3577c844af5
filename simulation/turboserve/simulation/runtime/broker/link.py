"""One connection between a client and the broker: a pair of ordered streams, as TCP has them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, Protocol

from turboserve.simulation.runtime.broker.messages import INBOX_PREFIX, Kind, Message
from turboserve.simulation.runtime.broker.network import Network, TimedClient
from turboserve.simulation.runtime.process import Process, enter

Action = Callable[[Any], None]


class LinkedClient(TimedClient, Protocol):
    """The client's end of a link."""

    process: Process | None

    def take(self, link: Link, sid: int, message: Message) -> None:
        """As `on_message`."""

    def on_message(self, delivery: tuple[Link, int, Message]) -> None:
        """Handle a message for the subscription of this number."""

    def on_pong(self, link: Link) -> None:
        """Handle the answer to a ping."""

    def on_end(self, link: Link) -> None:
        """Handle the end of the connection by the broker."""


class LinkedBroker(Protocol):
    """The broker's end of its links."""

    loop: asyncio.AbstractEventLoop
    network: Network
    context: Context
    slow_s: float
    undisturbed: bool

    def held_until(self, link: Link, to_broker: bool) -> float:
        """Return the time before which nothing arrives in this direction of the link."""

    def captures(self, subject: str) -> bool:
        """Return whether a stream stores messages on `subject`."""

    def publish(self, link: Link, message: Message) -> None:
        """Handle a message that a client published."""

    def subscribe(self, interest: Interest) -> None:
        """Add a subscription."""

    def unsubscribe(self, interest: Interest) -> None:
        """Remove a subscription."""

    def disconnect(self, link: Link) -> None:
        """Remove a connection, with its subscriptions."""


class Interest:
    """A subscription as the broker knows it."""

    __slots__ = ("left", "link", "pattern", "queue", "sid")

    def __init__(self, link: Link, sid: int, pattern: str, queue: str) -> None:
        self.link = link
        self.sid = sid
        self.pattern = pattern
        self.queue = queue
        self.left: int | None = None
        """Number of messages until the subscription ends by itself; None if it never does."""


class _Pipe:
    """One direction of a link. Messages keep their order; none arrives while the link is held.

    Messages to the client are read in its process's context: late if the process is frozen, never if it is
    dead.
    """

    __slots__ = (
        "_broker",
        "_context",
        "_immediate",
        "_last_at",
        "_link",
        "_queue",
        "_timer_set",
        "_to_broker",
    )

    def __init__(self, broker: LinkedBroker, link: Link, context: Context, to_broker: bool) -> None:
        self._broker, self._link, self._context, self._to_broker = broker, link, context, to_broker
        self._immediate = to_broker or broker.network.immediate
        self._queue: deque[tuple[float, Action, Any]] = deque()
        self._last_at = 0.0
        self._timer_set = False

    def send(self, delay_s: float, action: Action, argument: Any) -> None:
        broker = self._broker
        now = broker.loop.time()
        at = now + delay_s
        if at < self._last_at:
            at = self._last_at
        else:
            self._last_at = at
        if self._immediate and at <= now and not self._queue:
            to_broker = self._to_broker
            if broker.held_until(self._link, to_broker) <= now:
                if to_broker or self._link.open_at_client:
                    action(argument)
                return
        self._queue.append((at, action, argument))
        if not self._timer_set:
            self._wait(now, at)

    def resume(self) -> None:
        """Deliver what is due after a hold has ended early."""
        if self._queue:
            self._broker.loop.call_soon(self._arrive, context=self._context)

    def _wait(self, now: float, at: float) -> None:
        self._timer_set = True
        if at > now:
            self._broker.loop.call_at(at, self._arrive, context=self._context)
        else:
            self._broker.loop.call_soon(self._arrive, context=self._context)

    def _arrive(self) -> None:
        self._timer_set = False
        queue = self._queue
        while queue:
            now = self._broker.loop.time()
            at = max(queue[0][0], self._held_until())
            if at > now:
                self._wait(now, at)
                return
            _, action, argument = queue.popleft()
            if self._to_broker or self._link.open_at_client:
                action(argument)

    def _held_until(self) -> float:
        return self._broker.held_until(self._link, self._to_broker)


class Link:
    """A connection. Each side may close its end; the other side learns of it after all earlier messages."""

    def __init__(self, broker: LinkedBroker, client: LinkedClient) -> None:
        self.client = client
        self.process = client.process
        self.open_at_client = True
        self.open_at_broker = True
        self.interests: dict[int, Interest] = {}
        """Subscriptions by the client's number."""
        self._broker = broker
        self._context: Context = copy_context()
        self._context.run(enter, self.process)
        self._up = _Pipe(broker, self, broker.context, to_broker=True)
        self._down = _Pipe(broker, self, self._context, to_broker=False)
        self._entries = self._down
        if broker.network.entries_apart:
            self._entries = _Pipe(broker, self, self._context, to_broker=False)

    # From the client

    def publish(self, message: Message) -> None:
        broker, network = self._broker, self._broker.network
        if network.at_once and broker.undisturbed:
            # The same as `_Pipe.send`, which has nothing to wait for.
            if self.open_at_broker:
                broker.publish(self, message)
            return
        if not network.faulty:
            self._up.send(network.latency_s + broker.slow_s, self._published, message)
            return
        kind = self._kind(message)
        delay_s = network.delay(self.client, kind, True) + broker.slow_s
        fate = network.fate(self.client, kind, message, True)
        if fate is None:
            self._up.send(delay_s, self._published, message)
            return
        for _ in range(fate.copies):
            if fate.late_s is None:
                self._up.send(delay_s, self._published, message)
            else:
                self._send_late(fate.late_s, True, self._published, message)

    def subscribe(self, sid: int, pattern: str, queue: str) -> None:
        self._send_control(self._subscribed, (sid, pattern, queue))

    def unsubscribe(self, sid: int, limit: int) -> None:
        self._send_control(self._unsubscribed, (sid, limit))

    def ping(self) -> None:
        self._send_control(self._pinged, None)

    def close(self) -> None:
        """Close the client's end. What was sent before still arrives, as after `close` of a socket."""
        if self.open_at_client:
            self.open_at_client = False
            self._send_control(self._closed, None)

    def _send_control(self, action: Action, argument: Any) -> None:
        network = self._broker.network
        delay_s = network.delay(self.client, Kind.HINT, True) + self._broker.slow_s
        self._up.send(delay_s, action, argument)

    def _kind(self, message: Message) -> Kind:
        if message.reply:
            return Kind.APPEND if self._broker.captures(message.subject) else Kind.REQUEST
        return Kind.ANSWER if message.subject.startswith(INBOX_PREFIX) else Kind.HINT

    # At the broker

    def _published(self, message: Message) -> None:
        if self.open_at_broker:
            self._broker.publish(self, message)

    def _subscribed(self, subscription: tuple[int, str, str]) -> None:
        if self.open_at_broker:
            self._broker.subscribe(Interest(self, *subscription))

    def _unsubscribed(self, argument: tuple[int, int]) -> None:
        sid, limit = argument
        interest = self.interests.get(sid)
        if interest is None or not self.open_at_broker:
            return
        if limit:
            interest.left = limit
        else:
            self._broker.unsubscribe(interest)

    def _pinged(self, _: None) -> None:
        if self.open_at_broker:
            delay_s = self._broker.network.delay(self.client, Kind.HINT, False)
            self._down.send(delay_s, self.client.on_pong, self)

    def _closed(self, _: None) -> None:
        self._broker.disconnect(self)

    # From the broker

    def deliver(self, sid: int, kind: Kind, message: Message) -> None:
        """Send a message to the client's subscription."""
        network = self._broker.network
        if network.at_once and self._broker.undisturbed:
            if self.open_at_client:
                self.client.take(self, sid, message)
            return
        receive, argument = self.client.on_message, (self, sid, message)
        if not network.faulty:
            self._down.send(network.latency_s, receive, argument)
            return
        pipe = self._entries if kind is Kind.ENTRY else self._down
        delay_s = network.delay(self.client, kind, False)
        fate = network.fate(self.client, kind, message, False)
        if fate is None:
            pipe.send(delay_s, receive, argument)
            return
        for _ in range(fate.copies):
            if fate.late_s is None:
                pipe.send(delay_s, receive, argument)
            else:
                self._send_late(fate.late_s, False, receive, argument)

    def resume(self) -> None:
        """Resume after a fault that held the link has ended early."""
        for pipe in (self._up, self._down, self._entries):
            pipe.resume()

    def end(self) -> None:
        """Close the broker's end. The client still reads what was sent before."""
        self.open_at_broker = False
        delay_s = self._broker.network.delay(self.client, Kind.HINT, False)
        self._down.send(delay_s, self.client.on_end, self)

    def _send_late(self, late_s: float, to_broker: bool, action: Action, argument: Any) -> None:
        """Send outside the order of the connection."""
        loop, broker = self._broker.loop, self._broker
        context = broker.context if to_broker else self._context

        def arrive() -> None:
            held_until = broker.held_until(self, to_broker)
            if held_until > loop.time():
                loop.call_at(held_until, arrive, context=context)
            elif to_broker or self.open_at_client:
                action(argument)

        loop.call_later(late_s, arrive, context=context)
