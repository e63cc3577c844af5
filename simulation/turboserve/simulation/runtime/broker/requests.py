"""JetStream's requests about streams and consumers.

A handler takes the names in the subject and the request's body, and returns the answer.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from turboserve.simulation.runtime.broker import direct
from turboserve.simulation.runtime.broker.consumers import Consumer, MessageRouter
from turboserve.simulation.runtime.broker.formats import ZERO_TIME, ApiError, rfc3339
from turboserve.simulation.runtime.broker.stream import Stream
from turboserve.simulation.runtime.broker.stream_config import complete, subjects_overlap
from turboserve.simulation.runtime.broker.stream_table import StreamTable

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


class StreamRequests:
    """Requests about streams, and about the account."""

    def __init__(self, broker: MessageRouter, table: StreamTable, max_store_bytes: int | None) -> None:
        self.handlers: dict[str, Handler] = {
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
        }
        self._broker, self._table, self._max_store_bytes = broker, table, max_store_bytes

    def _account_info(self, _: list[str], __: dict[str, Any]) -> dict[str, Any]:
        unlimited = dict.fromkeys(ACCOUNT_LIMITS, -1)
        return {
            "memory": 0,
            "storage": sum(stream.bytes for stream in self._table.streams.values()),
            "streams": len(self._table.streams),
            "consumers": sum(map(len, self._table.consumers.values())),
            "limits": {**unlimited, "max_bytes_required": False},
            "api": {"total": 0, "errors": 0},
        }

    def _create(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        config = complete(request)
        known = self._table.streams.get(names[0])
        if known is not None:
            if known.config != config:
                raise ApiError(400, 10058, "stream name already in use with a different configuration")
            return self._described(known)
        self._check_config(names[0], config)
        stream = self._table.create(config)
        return {**self._described(stream), "did_create": True}

    def _update(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._table.find(names)
        config = complete(request)
        self._check_config(stream.name, config)
        self._table.configure(stream, config)
        return self._described(stream)

    def _check_config(self, name: str, config: dict[str, Any]) -> None:
        others = [stream for stream in self._table.streams.values() if stream.name != name]
        if any(subjects_overlap(stream.subjects, config["subjects"]) for stream in others):
            raise ApiError(400, 10065, "subjects overlap with an existing stream")
        if self._max_store_bytes is not None and config["max_bytes"] > 0:
            reserved = sum(max(0, stream.config["max_bytes"]) for stream in others)
            if reserved + config["max_bytes"] > self._max_store_bytes:
                raise ApiError(500, 10047, "insufficient storage resources available")

    def _info(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._table.find(names)
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
            "consumer_count": len(self._table.consumers[stream.name]),
        }
        now = rfc3339(self._broker.wall())
        return {"config": stream.config, "created": rfc3339(stream.created), "state": state, "ts": now}

    def _delete(self, names: list[str], _: dict[str, Any]) -> dict[str, Any]:
        self._table.forget(self._table.find(names).name)
        return {"success": True}

    def _purge(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._table.find(names)
        sequence, keep, pattern = request.get("seq"), request.get("keep"), request.get("filter") or ">"
        if sequence and keep:
            raise ApiError(400, 10003, "bad request")
        if sequence:
            return {"success": True, "purged": stream.remove_before(pattern, sequence)}
        return {"success": True, "purged": stream.keep_newest(pattern, keep or 0)}

    def _names(self, _: list[str], request: dict[str, Any]) -> dict[str, Any]:
        subject = request.get("subject")
        chosen = [
            stream.name
            for stream in self._table.streams.values()
            if not subject or subjects_overlap(stream.subjects, [subject])
        ]
        return {"total": len(chosen), "offset": 0, "limit": 1_024, "streams": chosen or None}

    def _list(self, _: list[str], __: dict[str, Any]) -> dict[str, Any]:
        found = [self._described(stream) for stream in self._table.streams.values()]
        return {"total": len(found), "offset": 0, "limit": 256, "streams": found}

    def _get_message(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._table.find(names)
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
        if not self._table.find(names).remove(request.get("seq") or 0):
            raise ApiError(500, 10057, "no message found")
        return {"success": True}


class ConsumerRequests:
    """Requests about consumers, except requests for messages."""

    def __init__(self, broker: MessageRouter, table: StreamTable) -> None:
        self.handlers: dict[str, Handler] = {
            "CONSUMER.CREATE": self._create_consumer,
            "CONSUMER.INFO": self._consumer_info,
            "CONSUMER.LIST": self._list_consumers,
            "CONSUMER.DELETE": self._delete_consumer,
        }
        self._broker, self._table = broker, table

    def _create_consumer(self, names: list[str], request: dict[str, Any]) -> dict[str, Any]:
        stream = self._table.find(names)
        config = {key: value for key, value in request["config"].items() if value is not None}
        name = names[1] if len(names) > 1 else config["name"]
        consumer = self._table.consumer(stream.name, name)
        if consumer is None:
            if config.get("ack_policy") != "none" or config.get("deliver_subject"):
                raise ApiError(400, 10012, "only pull consumers without acknowledgements are modelled")
            consumer = Consumer(self._broker, stream, name, config)
            self._table.consumers[stream.name][name] = consumer
        return consumer.info()

    def _found_consumer(self, names: list[str]) -> Consumer:
        self._table.find(names)
        consumer = self._table.consumer(names[0], names[1])
        if consumer is None:
            raise ApiError(404, 10014, "consumer not found")
        return consumer

    def _consumer_info(self, names: list[str], _: dict[str, Any]) -> dict[str, Any]:
        return self._found_consumer(names).info()

    def _list_consumers(self, names: list[str], _: dict[str, Any]) -> dict[str, Any]:
        stream = self._table.find(names).name
        found = [self._table.consumer(stream, name) for name in list(self._table.consumers[stream])]
        consumers = [consumer.info() for consumer in found if consumer is not None]
        return {"total": len(consumers), "offset": 0, "limit": 256, "consumers": consumers}

    def _delete_consumer(self, names: list[str], _: dict[str, Any]) -> dict[str, Any]:
        consumer = self._found_consumer(names)
        del self._table.consumers[names[0]][consumer.name]
        consumer.end()
        return {"success": True}
