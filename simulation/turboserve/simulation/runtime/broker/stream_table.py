"""A broker's streams and their consumers."""

from __future__ import annotations

from typing import Any

from turboserve.simulation.runtime.broker.consumers import Consumer, MessageRouter
from turboserve.simulation.runtime.broker.formats import ApiError
from turboserve.simulation.runtime.broker.patterns import PatternIndex
from turboserve.simulation.runtime.broker.stream import Stored, Stream


class StreamTable:
    """Streams and consumers by name."""

    def __init__(self, broker: MessageRouter) -> None:
        self.streams: dict[str, Stream] = {}
        self.consumers: dict[str, dict[str, Consumer]] = {}
        """Consumers by stream and name."""
        self._broker = broker
        self._captures: PatternIndex[str] = PatternIndex()

    def capturing(self, subject: str) -> str | None:
        """Return the name of the stream that stores messages on `subject`."""
        found = self._captures.match(subject)
        return found[0] if found else None

    def find(self, names: list[str]) -> Stream:
        """Return the stream of the first name. Raises ApiError if there is none."""
        stream = self.streams.get(names[0]) if names else None
        if stream is None:
            raise ApiError(404, 10059, "stream not found")
        stream.expire()
        return stream

    def consumer(self, stream: str, name: str) -> Consumer | None:
        """Return the consumer; None if it does not exist or was deleted for inactivity."""
        consumer = self.consumers.get(stream, {}).get(name)
        if consumer is not None and consumer.inactive(self._broker.loop.time()):
            del self.consumers[stream][name]
            return None
        return consumer

    def create(self, config: dict[str, Any]) -> Stream:
        """Create a stream. Raises ApiError for limits that the server does not accept."""
        stream = Stream(config, self._broker.wall)
        self.streams[stream.name] = stream
        self.consumers[stream.name] = {}
        stream.on_removed = lambda stored: self._removed(stream, stored)
        self._capture(stream)
        return stream

    def configure(self, stream: Stream, config: dict[str, Any]) -> None:
        """Reconfigure a stream. Raises ApiError for limits that the server does not accept."""
        for pattern in stream.subjects:
            self._captures.remove(pattern, stream.name)
        stream.configure(config)
        self._capture(stream)

    def forget(self, name: str) -> None:
        """Delete the stream and its consumers."""
        stream = self.streams.pop(name)
        for pattern in stream.subjects:
            self._captures.remove(pattern, name)
        for consumer in self.consumers.pop(name).values():
            consumer.end()

    def _capture(self, stream: Stream) -> None:
        for pattern in stream.subjects:
            self._captures.add(pattern, stream.name)

    def _removed(self, stream: Stream, stored: Stored) -> None:
        for consumer in self.consumers.get(stream.name, {}).values():
            consumer.removed(stored)
