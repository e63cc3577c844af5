"""JetStream's requests: `$JS.API.…` and appends."""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from turboserve.bench.runtime.broker import direct
from turboserve.bench.runtime.broker.consumers import Consumer
from turboserve.bench.runtime.broker.formats import ZERO_TIME, ApiError, rfc3339, to_json
from turboserve.bench.runtime.broker.messages import Kind, Message
from turboserve.bench.runtime.broker.patterns import PatternIndex
from turboserve.bench.runtime.broker.stream import Stored, Stream
from turboserve.bench.runtime.broker.stream_config import complete, subjects_overlap

if TYPE_CHECKING:
    from turboserve.bench.runtime.broker.server import MemoryBroker

API = "$JS.API."
TYPES = "io.nats.jetstream.api.v1."
NO_STREAM = ApiError(404, 10059, "stream not found")
NO_CONSUMER = ApiError(404, 10014, "consumer not found")
BAD_REQUEST = ApiError(400, 10003, "bad request")
TOO_LARGE = ApiError(500, 10047, "insufficient storage resources available")
ACCOUNT_LIMITS = (
    "max_memory",
    "max_storage",
    "max_streams",
    "max_consumers",
    "max_ack_pending",
    "memory_max_stream_bytes",
    "storage_max_stream_bytes",
)
Handler = Callable[[list[str], dict[str, Any]], dict[str, Any]]


class Storage(enum.Enum):
    """What the broker's disk does."""

    STORES = "stores"
    FULL = "full"
    """Appends are refused."""
    SILENT = "silent"
    """Appends are neither stored nor answered."""
    OFF = "off"
    """JetStream is switched off: its requests and appends have no responders."""


class JetStream:
    """The streams of a broker and their consumers."""

    def __init__(self, broker: MemoryBroker, max_store_bytes: int | None) -> None:
        self.streams: dict[str, Stream] = {}
        self.storage = Storage.STORES
        self.on_append: Callable[[Stream, Stored], None] = lambda _stream, _stored: None
        """Called with each accepted message, before anyone hears of it."""
        self._broker = broker
        self._max_store_bytes = max_store_bytes
        self._captures: PatternIndex[str] = PatternIndex()
        self._consumers: dict[str, dict[str, Consumer]] = {}
        self._handlers: dict[str, Handler] = {
            "INFO": self._account_info,
            "STREAM.CREATE": self._create,
            "STREAM.UPDATE": self._update,
            "STREAM.INFO": self._info,
            "STREAM.DELETE": self._delete,
            "STREAM.PURGE": self._purge,
            "STREAM.NAMES": self._names,
            "STREAM.LIST": self._list,
            "STREAM.MSG.GET": self._get_message,
            "STREAM.MSG.DELETE": self._delete_message,
            "CONSUMER.CREATE": self._create_consumer,
            "CONSUMER.INFO": self._consumer_info,
            "CONSUMER.LIST": self._list_consumers,
            "CONSUMER.DELETE": self._delete_consumer,
        }

    def capturing(self, subject: str) -> str | None:
        """The stream that stores messages on `subject`."""
        found = self._captures.match(subject)
        return found[0] if found else None

    def lose_streams(self) -> None:
        """The disk is gone."""
        for name in list(self.streams):
            self._forget(name)

    def restarted(self) -> None:
        """The broker ended: consumers were in memory."""
        self._consumers = {name: {} for name in self.streams}

    # Appends

    def append(self, name: str, message: Message) -> bool:
        """Store a message and answer it; returns whether there is a JetStream to do so."""
        if self.storage is Storage.OFF:
            return False
        if self.storage is Storage.SILENT:
            return True
        stream = self.streams[name]
        try:
            if self.storage is Storage.FULL:
                raise ApiError(503, 10077, "no space left on device")
            appended = stream.append(message.subject, message.data, message.headers or {})
        except ApiError as error:
            self._answer(message, to_json({"error": error.body(), "stream": name, "seq": 0}), Kind.ACK)
            return True
        if appended.stored is None:
            self._answer(
                message, b'{"stream":"%b","seq":%d,"duplicate": true}' % (name.encode(), appended.sequence)
            )
            return True
        self.on_append(stream, appended.stored)
        self._republish(stream, appended.stored, appended.before)
        self._answer(message, b'{"stream":"%b","seq":%d}' % (name.encode(), appended.sequence))
        for consumer in self._consumers[name].values():
            consumer.appended(appended.stored)
        return True

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
        """Answer a request to the API; returns whether there is something that hears it."""
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
            consumer = self._consumer(tokens[3], tokens[4]) if len(tokens) == 5 else None
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
        # What the server does not know it hears and does not answer.
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

    def _stream(self, names: list[str]) -> Stream:
        stream = self.streams.get(names[0]) if names else None
        if stream is None:
            raise NO_STREAM
        stream.expire()
        return stream

    def _account_info(self, _: list[str], __: dict[str, Any]) -> dict[str, Any]:
        unlimited = dict.fromkeys(ACCOUNT_LIMITS, -1)
        return {
            "memory": 0,
            "storage": sum(stream.bytes for stream in self.streams.values()),
            "streams": len(self.streams),
            "consumers": sum(map(len, self._consumers.values())),
            "limits": {**unlimited, "max_bytes_required": False},
            "api": {"total": 0, "errors": 0},
        }

    def _create(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        config = complete(request)
        known = self.streams.get(names[0])
        if known is not None:
            if known.config != config:
                raise ApiError(400, 10058, "stream name already in use with a different configuration")
            return self._described(known)
        self._check_config(names[0], config)
        stream = Stream(config, self._broker.wall)
        self.streams[stream.name] = stream
        self._consumers[stream.name] = {}
        stream.on_removed = lambda stored: self._removed(stream, stored)
        for pattern in stream.subjects:
            self._captures.add(pattern, stream.name)
        return {**self._described(stream), "did_create": True}

    def _update(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(names)
        config = complete(request)
        self._check_config(stream.name, config)
        for pattern in stream.subjects:
            self._captures.remove(pattern, stream.name)
        stream.configure(config)
        for pattern in stream.subjects:
            self._captures.add(pattern, stream.name)
        return self._described(stream)

    def _check_config(self, name: str, config: dict[str, Any]) -> None:
        others = [stream for stream in self.streams.values() if stream.name != name]
        if any(subjects_overlap(stream.subjects, config["subjects"]) for stream in others):
            raise ApiError(400, 10065, "subjects overlap with an existing stream")
        if self._max_store_bytes is not None and config["max_bytes"] > 0:
            reserved = sum(max(0, stream.config["max_bytes"]) for stream in others)
            if reserved + config["max_bytes"] > self._max_store_bytes:
                raise TOO_LARGE

    def _info(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(names)
        body = self._described(stream)
        if pattern := request.get("subjects_filter"):
            body["state"]["subjects"] = stream.counts(pattern)
        return body

    def _described(self, stream: Stream) -> dict[str, Any]:
        first = stream.get(stream.first_sequence)
        state = {
            "messages": stream.count,
            "bytes": stream.bytes,
            "first_seq": stream.first_sequence,
            "first_ts": ZERO_TIME if first is None else rfc3339(first.time),
            "last_seq": stream.last_sequence,
            "last_ts": ZERO_TIME if stream.last_time is None else rfc3339(stream.last_time),
            "num_subjects": stream.subject_count,
            "consumer_count": len(self._consumers[stream.name]),
        }
        now = rfc3339(self._broker.wall())
        return {"config": stream.config, "created": rfc3339(stream.created), "state": state, "ts": now}

    def _delete(self, names: list[str], _: dict[str, Any]) -> dict[str, Any]:
        self._forget(self._stream(names).name)
        return {"success": True}

    def _forget(self, name: str) -> None:
        stream = self.streams.pop(name)
        for pattern in stream.subjects:
            self._captures.remove(pattern, name)
        for consumer in self._consumers.pop(name).values():
            consumer.end()

    def _purge(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(names)
        sequence, keep, pattern = request.get("seq"), request.get("keep"), request.get("filter") or ">"
        if sequence and keep:
            raise BAD_REQUEST
        if sequence:
            return {"success": True, "purged": stream.remove_before(pattern, sequence)}
        return {"success": True, "purged": stream.keep_newest(pattern, keep or 0)}

    def _names(self, _: list[str], request: dict[str, Any]) -> dict[str, Any]:
        subject = request.get("subject")
        chosen = [
            stream.name
            for stream in self.streams.values()
            if not subject or subjects_overlap(stream.subjects, [subject])
        ]
        return {"total": len(chosen), "offset": 0, "limit": 1_024, "streams": chosen or None}

    def _list(self, _: list[str], __: dict[str, Any]) -> dict[str, Any]:
        found = [self._described(stream) for stream in self.streams.values()]
        return {"total": len(found), "offset": 0, "limit": 256, "streams": found}

    def _get_message(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(names)
        stored = direct.find(stream, request)
        if stored is None:
            raise ApiError(404, 10037, "no message found")
        found = {
            "subject": stored.subject,
            "seq": stored.sequence,
            "data": base64.b64encode(stored.data).decode(),
            "time": rfc3339(stored.time),
        }
        if stored.headers:
            lines = "".join(f"{key}: {value}\r\n" for key, value in stored.headers.items())
            found["hdrs"] = base64.b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode()
        return {"message": found}

    def _delete_message(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        if not self._stream(names).remove(request.get("seq") or 0):
            raise ApiError(500, 10057, "no message found")
        return {"success": True}

    # Consumers

    def _consumer(self, stream: str, name: str) -> Consumer | None:
        consumer = self._consumers.get(stream, {}).get(name)
        if consumer is not None and consumer.inactive(self._broker.loop.time()):
            del self._consumers[stream][name]
            return None
        return consumer

    def _create_consumer(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(names)
        config = {key: value for key, value in request["config"].items() if value is not None}
        name = names[1] if len(names) > 1 else config["name"]
        consumer = self._consumer(stream.name, name)
        if consumer is None:
            if config.get("ack_policy") != "none" or config.get("deliver_subject"):
                raise ApiError(400, 10012, "only pull consumers without acknowledgements are modelled")
            consumer = Consumer(self._broker, stream, name, config)
            self._consumers[stream.name][name] = consumer
        return consumer.info()

    def _found_consumer(self, names: list[str]) -> Consumer:
        self._stream(names)
        consumer = self._consumer(names[0], names[1])
        if consumer is None:
            raise NO_CONSUMER
        return consumer

    def _consumer_info(self, names: list[str], _: dict[str, Any]) -> dict[str, Any]:
        return self._found_consumer(names).info()

    def _list_consumers(self, names: list[str], _: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(names).name
        found = [self._consumer(stream, name) for name in list(self._consumers[stream])]
        consumers = [consumer.info() for consumer in found if consumer is not None]
        return {"total": len(consumers), "offset": 0, "limit": 256, "consumers": consumers}

    def _delete_consumer(self, names: list[str], _: dict[str, Any]) -> dict[str, Any]:
        consumer = self._found_consumer(names)
        del self._consumers[names[0]][consumer.name]
        consumer.end()
        return {"success": True}

    def _removed(self, stream: Stream, stored: Stored) -> None:
        for consumer in self._consumers.get(stream.name, {}).values():
            consumer.removed(stored)


def _pull_request(data: bytes) -> dict[str, Any]:
    try:
        request = json.loads(data) if data else {}
    except ValueError:
        return {}
    return request if isinstance(request, dict) else {"batch": request}
