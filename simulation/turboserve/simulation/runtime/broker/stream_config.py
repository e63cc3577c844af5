"""A stream's configuration as the server completes it, its sizes, and its mapping of subjects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turboserve.simulation.runtime.broker.patterns import overlap, wildcards

NS = 10**9
RECORD_BYTES, HEADER_RECORD_BYTES = 30, 34
"""Bytes that the server's file store adds to subject and body, without and with headers."""
HEADER_LINE_BYTES = len("NATS/1.0\r\n\r\n")
UNLIMITED = ("max_consumers", "max_msgs", "max_bytes", "max_msgs_per_subject", "max_msg_size")
DEFAULTS: dict[str, Any] = {
    "retention": "limits",
    "max_age": 0,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 0,
    "allow_direct": False,
    "allow_msg_ttl": False,
}
LONGEST_DUPLICATE_WINDOW = 120 * NS


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the server's defaults for absent values."""
    full = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    for key in UNLIMITED:
        full[key] = full.get(key) or -1
    full.setdefault("subjects", [full["name"]])
    if not full["duplicate_window"]:
        age = full["max_age"]
        full["duplicate_window"] = min(age, LONGEST_DUPLICATE_WINDOW) if age else LONGEST_DUPLICATE_WINDOW
    return full


def subjects_overlap(first: list[str], second: list[str]) -> bool:
    return any(overlap(a, b) for a in first for b in second)


def size_of(subject: str, data: bytes, headers: Mapping[str, str]) -> int:
    """Return the bytes of a message in the server's file store."""
    if not headers:
        return RECORD_BYTES + len(subject) + len(data)
    text = "".join((*headers, *headers.values()))
    lines = (len(text) if text.isascii() else len(text.encode())) + 4 * len(headers)
    return HEADER_RECORD_BYTES + len(subject) + len(data) + HEADER_LINE_BYTES + lines


def transform(source: str, destination: str, subject: str) -> str:
    """Map a subject by a pair of patterns.

    A destination is, for example, `live.>` or `live.chunk.{{wildcard(1)}}`.
    """
    tokens: list[str] = []
    found = wildcards(source, subject)
    tail = subject.split(".")[len(source.split(".")) - 1 :] if source.endswith(">") else []
    for token in destination.split("."):
        if token == ">":
            tokens += tail
        elif token.startswith("{{") and "wildcard(" in token.lower():
            tokens.append(found[int(token[token.index("(") + 1 : token.index(")")]) - 1])
        elif token.startswith("$") and token[1:].isdigit():
            tokens.append(found[int(token[1:]) - 1])
        else:
            tokens.append(token)
    return ".".join(tokens)
