"""What a gateway sends over a stream's WebSocket, as chunks, events and skips."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from websockets.exceptions import ConnectionClosed

from turboserve.client.errors import ProtocolError
from turboserve.client.models import Chunk, End, Event, Hello, Skip, VideoFormat

PROTOCOL_VERSION = 1
FINAL_CODES = {4401: 401, 4403: 403, 4404: 404, 4410: 410, 4422: 422, 1007: 400, 1008: 400, 1009: 413}
"""Close codes after which a connection with the same parameters would end in the same way, and the status of
their problems."""
_NO_CLOSE_FRAME = 1006

Item = Chunk | Event | Skip | End


class MessageReader:
    """Reads the messages of one connection, in order."""

    def __init__(self) -> None:
        self.problem: dict[str, Any] = {}
        """Newest problem that the gateway has sent. Empty: none."""
        self._format: VideoFormat | None = None
        self._announced: dict[str, Any] | None = None

    def read(self, raw: str | bytes) -> Item | None:
        """Return what a message completes. None: nothing yet. Raises ProtocolError."""
        if isinstance(raw, bytes):
            return self._video(raw)
        message = json.loads(raw)
        match message.get("type", ""):
            case "init" | "chunk":
                self._announced = message
            case "error":
                self.problem = message
            case "end":
                return End.model_validate(message)
            case "skip":
                return Skip(message["index"], message["start_s"], message["control_seq"])
            case _ if "sequence" in message:
                return Event.model_validate(message)
        # Other messages are of a newer gateway.
        return None

    def _video(self, data: bytes) -> Chunk | None:
        message, self._announced = self._announced, None
        if message is None or message.get("bytes") != len(data):
            raise ProtocolError(f"{len(data)} bytes of video were not announced")
        if message["type"] == "init":
            self._format = VideoFormat(
                message["mime"], message["width"], message["height"], message["fps"], data
            )
            return None
        if self._format is None:
            raise ProtocolError("a chunk came before the init segment")
        return Chunk(
            index=message["index"],
            start_s=message["start_s"],
            duration_s=message["duration_s"],
            control_seq=message["control_seq"],
            epoch=message["epoch"],
            worker=message["worker"],
            compute_s=message["compute_s"],
            published_at=message["published_at"],
            format=self._format,
            fragment=data,
        )


def read_hello(message: dict[str, Any]) -> Hello:
    """Return the greeting. Raises ProtocolError if it is not one, or of another version of the protocol."""
    try:
        hello = Hello.model_validate(message)
    except ValidationError as error:
        raise ProtocolError(f"the greeting is not one of this protocol: {error}") from error
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the gateway has version {hello.protocol_version} of the protocol, "
            f"and this client version {PROTOCOL_VERSION}"
        )
    return hello


def close_code(closed: ConnectionClosed) -> int:
    """Return the code of the gateway's close frame, or the code that stands for a missing one."""
    return closed.rcvd.code if closed.rcvd is not None else _NO_CLOSE_FRAME


def without_skipped(received: deque[Item | Exception], skip: Skip, *, keep: bool) -> Skip:
    """Discard the received chunks before the skip, unless they are kept. Return it with their indices."""
    early = [each for each in received if isinstance(each, Chunk) and each.index < skip.index]
    if keep:
        early = []
    for chunk in early:
        received.remove(chunk)
    return replace(skip, discarded=tuple(chunk.index for chunk in early))
