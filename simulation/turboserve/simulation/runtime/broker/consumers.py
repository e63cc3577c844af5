"""Pull consumers without acknowledgements, with which the state store counts chunks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Protocol

from turboserve.simulation.runtime.broker.formats import rfc3339
from turboserve.simulation.runtime.broker.messages import Kind, Message
from turboserve.simulation.runtime.broker.patterns import matches
from turboserve.simulation.runtime.broker.stream import Stored, Stream
from turboserve.simulation.runtime.broker.stream_config import NS

INACTIVE_S = 5.0
"""Time without a request after which a consumer is deleted, unless its configuration sets another."""
SUBJECTS_KEPT = 20_000


class MessageRouter(Protocol):
    """The broker as JetStream uses it."""

    loop: asyncio.AbstractEventLoop
    context: Context

    def wall(self) -> float:
        """Return the seconds since the epoch."""

    def listens(self, subject: str) -> bool:
        """Return whether a client subscribes to `subject`."""

    def route(self, subject: str, message: Message, kind: Kind) -> bool:
        """Deliver to every subscriber of `subject`. Returns whether there is a subscriber."""


class _Pull:
    """A request for messages that waits."""

    __slots__ = ("delivered", "expires_at", "left", "no_wait", "reply")

    def __init__(self, reply: str, left: int, no_wait: bool, expires_at: float | None) -> None:
        self.reply = reply
        self.left = left
        self.no_wait = no_wait
        self.expires_at = expires_at
        self.delivered = 0


class Consumer:
    """Delivers each message that matches its filters once, in order, to the clients that request messages."""

    def __init__(self, broker: MessageRouter, stream: Stream, name: str, config: dict[str, Any]) -> None:
        self.name, self.config = name, config
        self.created = broker.wall()
        self._broker, self._stream = broker, stream
        filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
        self._filters: list[str] = filters
        self._takes_all = ">" in filters
        self._taken: dict[str, bool] = {}
        """Whether a filter matches a subject, by subject."""
        self._headers_only = bool(config.get("headers_only"))
        self._inactive_s = (config.get("inactive_threshold") or INACTIVE_S * NS) / NS
        self._delivered = 0
        self._next = _first(stream, config)
        self._position = self._next - 1
        self._pending = sum(1 for stored in stream.from_sequence(self._next) if self._takes(stored.subject))
        self._pulls: deque[_Pull] = deque()
        self._used_at = broker.loop.time()

    def info(self) -> dict[str, Any]:
        delivered = {"consumer_seq": self._delivered, "stream_seq": self._position}
        return {
            "stream_name": self._stream.name,
            "name": self.name,
            "created": rfc3339(self.created),
            "config": self.config,
            "delivered": delivered,
            "ack_floor": delivered,
            "num_ack_pending": 0,
            "num_redelivered": 0,
            "num_waiting": len(self._pulls),
            "num_pending": self._pending,
            "ts": rfc3339(self._broker.wall()),
        }

    def inactive(self, now: float) -> bool:
        """Return whether the server would have deleted the consumer for inactivity."""
        self._end_expired(now)
        return not self._pulls and now - self._used_at > self._inactive_s

    def pull(self, message: Message, request: dict[str, Any]) -> None:
        """Handle a request for messages."""
        now = self._broker.loop.time()
        self._used_at = now
        expires_s = (request.get("expires") or 0) / NS
        no_wait = bool(request.get("no_wait"))
        pull = _Pull(
            message.reply, request.get("batch") or 1, no_wait, now + expires_s if expires_s > 0.0 else None
        )
        if no_wait and pull.expires_at is None and not self._pending:
            self._status(pull, "404", "No Messages")
            return
        self._pulls.append(pull)
        if pull.expires_at is not None:
            loop, context = self._broker.loop, self._broker.context
            loop.call_at(pull.expires_at, self._expire, pull, context=context)
        self.deliver()

    def deliver(self) -> None:
        """Deliver the available messages to the waiting requests."""
        if not self._pulls:
            return
        self._end_expired(self._broker.loop.time())
        while self._pulls:
            pull = self._pulls[0]
            if not self._broker.listens(pull.reply):
                self._pulls.popleft()
                continue
            stored = self._take()
            if stored is None:
                if pull.no_wait and (pull.delivered or pull.expires_at is None):
                    self._pulls.popleft()
                    self._status(pull, "404", "No Messages")
                    continue
                return
            self._send(pull, stored)
            if pull.left == 0:
                self._pulls.popleft()

    def removed(self, stored: Stored) -> None:
        """Note that the stream has removed a message."""
        if stored.sequence >= self._next and self._takes(stored.subject):
            self._pending -= 1

    def appended(self, stored: Stored) -> None:
        """Note that the stream has a new message."""
        if stored.sequence >= self._next and self._takes(stored.subject):
            self._pending += 1
            if self._pulls and not self._delivered_at_once(stored):
                self.deliver()

    def _delivered_at_once(self, stored: Stored) -> bool:
        """Deliver a message that nothing precedes to the first waiting request. Returns whether it was."""
        pull = self._pulls[0]
        now = self._broker.loop.time()
        over = pull.expires_at is not None and pull.expires_at <= now
        if self._pending > 1 or over or pull.no_wait or not self._broker.listens(pull.reply):
            return False
        self._next, self._pending = stored.sequence + 1, 0
        self._send(pull, stored)
        if pull.left == 0:
            self._pulls.popleft()
        return True

    def end(self) -> None:
        """End the waiting requests, because the consumer was deleted."""
        while self._pulls:
            self._status(self._pulls.popleft(), "409", "Consumer Deleted")

    def _take(self) -> Stored | None:
        if not self._pending:
            self._next = max(self._next, self._stream.last_sequence + 1)
            return None
        for stored in self._stream.from_sequence(self._next):
            self._next = stored.sequence + 1
            if self._takes(stored.subject):
                self._pending -= 1
                return stored
        return None

    def _send(self, pull: _Pull, stored: Stored) -> None:
        self._delivered += 1
        self._position = stored.sequence
        pull.delivered += 1
        pull.left -= 1
        ack = (
            f"$JS.ACK.{self._stream.name}.{self.name}.1.{stored.sequence}.{self._delivered}"
            f".{round(stored.time * NS)}.{self._pending}"
        )
        headers, data = stored.headers, stored.data
        if self._headers_only:
            headers, data = {**headers, "Nats-Msg-Size": str(len(data))}, b""
        self._broker.route(pull.reply, Message(stored.subject, data, ack, headers), Kind.ENTRY)

    def _expire(self, pull: _Pull) -> None:
        if pull in self._pulls:
            self._end_expired(self._broker.loop.time())

    def _end_expired(self, now: float) -> None:
        for pull in [pull for pull in self._pulls if pull.expires_at is not None and pull.expires_at <= now]:
            self._pulls.remove(pull)
            self._used_at = max(self._used_at, pull.expires_at or 0.0)
            counts = {"Nats-Pending-Messages": str(pull.left), "Nats-Pending-Bytes": "0"}
            self._status(pull, "408", "Request Timeout", counts)

    def _status(self, pull: _Pull, status: str, text: str, further: dict[str, str] | None = None) -> None:
        headers = {"Status": status, "Description": text, **(further or {})}
        self._broker.route(pull.reply, Message(pull.reply, headers=headers), Kind.ENTRY)

    def _takes(self, subject: str) -> bool:
        if self._takes_all:
            return True
        taken = self._taken.get(subject)
        if taken is None:
            taken = any(matches(pattern, subject) for pattern in self._filters)
            if len(self._taken) < SUBJECTS_KEPT:
                self._taken[subject] = taken
        return taken


def _first(stream: Stream, config: dict[str, Any]) -> int:
    """Return the sequence at which the consumer begins."""
    policy = config.get("deliver_policy") or "all"
    starts: dict[str, Callable[[], int]] = {
        "all": lambda: 1,
        "new": lambda: stream.last_sequence + 1,
        "by_start_sequence": lambda: config["opt_start_seq"],
        "last": lambda: max(1, stream.last_sequence),
    }
    return max(1, starts[policy]())
