"""Messages between clients and the broker."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Kind(enum.Enum):
    """Role of a message, by which faults apply to it."""

    HINT = "hint"
    """Published by a client to every subscriber."""
    REQUEST = "request"
    """Published by a client that waits for an answer of another client or of JetStream."""
    ANSWER = "answer"
    """Published by a client to another client's inbox."""
    APPEND = "append"
    """A request on a subject of a stream."""
    ACK = "ack"
    """The broker's answer to an append."""
    API_ANSWER = "api answer"
    """The broker's answer to a request to JetStream, or its report that a request has no responders."""
    ENTRY = "entry"
    """A stored message on its way to a follower of the stream: republished, or of a consumer."""


class Message:
    """One published message. All receivers share it, so neither it nor its headers may be changed."""

    __slots__ = ("data", "headers", "reply", "subject")

    def __init__(
        self, subject: str, data: bytes = b"", reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        self.subject = subject
        self.data = data
        self.reply = reply
        self.headers = headers

    def __repr__(self) -> str:
        return f"Message({self.subject!r}, {len(self.data)} bytes)"


INBOX_PREFIX = "_INBOX"
"""Prefix of every client's inbox."""
