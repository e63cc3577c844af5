"""JetStream's requests: `$JS.API.…` and appends."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from typing import Any

from turboserve.simulation.runtime.broker import direct
from turboserve.simulation.runtime.broker.consumers import MessageRouter
from turboserve.simulation.runtime.broker.formats import ApiError, to_json
from turboserve.simulation.runtime.broker.messages import Kind, Message
from turboserve.simulation.runtime.broker.requests import ConsumerRequests, Handler, StreamRequests
from turboserve.simulation.runtime.broker.stream import Appended, Stored, Stream
from turboserve.simulation.runtime.broker.stream_table import StreamTable

API = "$JS.API."
TYPES = "io.nats.jetstream.api.v1."


class Storage(enum.Enum):
    """State of the broker's disk."""

    STORES = "stores"
    FULL = "full"
    """Appends are refused."""
    SILENT = "silent"
    """Appends are neither stored nor answered."""
    OFF = "off"
    """JetStream is switched off: its requests and appends have no responders."""


class JetStream:
    """The streams of a broker and their consumers."""

    def __init__(self, broker: MessageRouter, max_store_bytes: int | None) -> None:
        self.storage = Storage.STORES
        self.on_append: Callable[[Stream, Stored], None] = lambda _stream, _stored: None
        """Called with each accepted message, before it is republished, acknowledged or delivered."""
        self._broker = broker
        self._table = StreamTable(broker)
        self._handlers: dict[str, Handler] = {
            **StreamRequests(broker, self._table, max_store_bytes).handlers,
            **ConsumerRequests(broker, self._table).handlers,
        }

    @property
    def streams(self) -> Mapping[str, Stream]:
        """Streams by name."""
        return self._table.streams

    def capturing(self, subject: str) -> str | None:
        """Return the name of the stream that stores messages on `subject`."""
        return self._table.capturing(subject)

    def lose_streams(self) -> None:
        """Delete all streams, as with a lost disk."""
        for name in list(self.streams):
            self._table.forget(name)

    def lose_after(self, time: float) -> None:
        """Lose the messages of all streams that are later than `time`, wall-clock seconds."""
        for stream in self.streams.values():
            stream.lose_after(time)

    def restarted(self) -> None:
        """Delete all consumers, which are in memory, after the broker ended."""
        self._table.consumers = {name: {} for name in self.streams}

    # Appends

    def append(self, name: str, message: Message) -> bool:
        """Store a message and answer it. Returns False if JetStream is off."""
        if self.storage is Storage.OFF:
            return False
        if self.storage is Storage.SILENT:
            return True
        stream = self.streams[name]
        try:
            appended = self.store(stream, message)
        except ApiError as error:
            self._answer(message, to_json({"error": error.body(), "stream": name, "seq": 0}), Kind.ACK)
            return True
        stored = appended.stored
        if stored is None:
            self._answer(
                message, b'{"stream":"%b","seq":%d,"duplicate": true}' % (name.encode(), appended.sequence)
            )
            return True
        self._answer(message, b'{"stream":"%b","seq":%d}' % (name.encode(), appended.sequence))
        self.deliver(stream, stored)
        return True

    def store(self, stream: Stream, message: Message) -> Appended:
        """Store a message and republish it. Raises ApiError if a condition or a limit refuses it."""
        if self.storage is Storage.FULL:
            raise ApiError(503, 10077, "no space left on device")
        appended = stream.append(message.subject, message.data, message.headers or {})
        if appended.stored is not None:
            self.on_append(stream, appended.stored)
            self._republish(stream, appended.stored, appended.before)
        return appended

    def deliver(self, stream: Stream, stored: Stored) -> None:
        """Deliver a stored message to the stream's consumers, after its acknowledgement."""
        for consumer in self._table.consumers[stream.name].values():
            consumer.appended(stored)

    def _republish(self, stream: Stream, stored: Stored, before: int) -> None:
        subject = stream.live_subject(stored.subject)
        if subject is None or not self._broker.listens(subject):
            return
        headers = direct.stored_headers(stream, stored)
        headers["Nats-Last-Sequence"] = str(before)
        data = stored.data
        if stream.republishes_headers_only:
            headers["Nats-Msg-Size"] = str(len(data))
            data = b""
        self._broker.route(subject, Message(subject, data, headers=headers), Kind.ENTRY)

    def _answer(self, request: Message, body: bytes, kind: Kind = Kind.ACK) -> None:
        if request.reply:
            self._broker.route(request.reply, Message(request.reply, body), kind)

    # Requests

    def request(self, message: Message) -> bool:
        """Answer a request to the API. Returns False if the request has no responder."""
        if self.storage is Storage.OFF:
            return False
        tokens = message.subject[len(API) :].split(".")
        if tokens[:2] == ["DIRECT", "GET"]:
            stream = self.streams.get(tokens[2]) if len(tokens) > 2 else None
            if stream is None or not stream.allow_direct:
                return False
            stream.expire()
            for answer in direct.answers(stream, ".".join(tokens[3:]), message):
                self._broker.route(message.reply, answer, Kind.API_ANSWER)
            return True
        if tokens[:3] == ["CONSUMER", "MSG", "NEXT"]:
            consumer = self._table.consumer(tokens[3], tokens[4]) if len(tokens) == 5 else None
            if consumer is None:
                return False
            consumer.pull(message, _pull_request(message.data))
            return True
        for length in (3, 2, 1):
            handler = self._handlers.get(".".join(tokens[:length]))
            if handler is not None:
                kind = "_".join(tokens[:length]).lower()
                self._answer(message, self._handle(kind, handler, tokens[length:], message), Kind.API_ANSWER)
                break
        # The server receives unknown requests and does not answer them.
        return True

    def _handle(self, kind: str, handler: Handler, names: list[str], message: Message) -> bytes:
        body: dict[str, Any] = {"type": f"{TYPES}{kind}_response"}
        try:
            try:
                request = json.loads(message.data) if message.data else {}
            except ValueError:
                raise ApiError(400, 10025, "invalid JSON") from None
            body |= handler(names, request)
        except ApiError as error:
            body["error"] = error.body()
        return to_json(body)


def _pull_request(data: bytes) -> dict[str, Any]:
    try:
        request = json.loads(data) if data else {}
    except ValueError:
        return {}
    return request if isinstance(request, dict) else {"batch": request}
