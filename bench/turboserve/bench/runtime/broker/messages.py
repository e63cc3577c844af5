"""What travels between clients and the broker."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class Kind(enum.Enum):
    """What a message is to the faults that may hit it."""

    HINT = "hint"
    """Published by a client to every subscriber."""
    REQUEST = "request"
    """Published by a client, which waits for an answer of another client or of JetStream."""
    ANSWER = "answer"
    """Published by a client to another's inbox."""
    APPEND = "append"
    """A request on a subject of a stream."""
    ACK = "ack"
    """The broker's answer to an append."""
    API_ANSWER = "api answer"
    """The broker's answer to a request to JetStream, or that a request has no responders."""
    ENTRY = "entry"
    """A stored message on its way to those who follow the stream: republished, or of a consumer."""


class Message:
    """One published message. Treated as immutable, its headers too: all receivers share it."""

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
"""Every client's inbox begins so."""
