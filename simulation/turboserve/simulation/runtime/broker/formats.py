"""Times, durations and answers in JetStream's format."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
ZERO_TIME = "0001-01-01T00:00:00Z"


class ApiError(Exception):
    """JetStream refuses a request."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(description)
        self.code = code
        self.err_code = err_code
        self.description = description

    def body(self) -> dict[str, Any]:
        return {"code": self.code, "err_code": self.err_code, "description": self.description}


@functools.lru_cache(maxsize=64)
def ttl_seconds(text: str) -> float | None:
    """Return a message's time to live in seconds; None if `text` is not valid.

    `text` is a number of seconds, a duration such as `1h30m`, or `never`, which gives 0.
    """
    if text == "never":
        return 0.0
    if text.isdigit():
        seconds = float(text)
    elif re.fullmatch(f"(?:{_DURATION.pattern})+", text):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
    else:
        return None
    return seconds if seconds >= 1.0 else None


@functools.lru_cache(maxsize=64)
def _to_the_second(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def rfc3339(seconds: float) -> str:
    """Format wall-clock seconds in UTC, with nanoseconds as Go writes them."""
    whole, fraction = divmod(round(seconds * 1e9), 1_000_000_000)
    if not fraction:
        return f"{_to_the_second(whole)}Z"
    return f"{_to_the_second(whole)}.{f'{fraction:09d}'.rstrip('0')}Z"


def to_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def as_received(headers: dict[str, str]) -> dict[str, str]:
    """Return headers as they arrive: nats-py strips keys and values, and replaces line breaks in values."""
    # Each of these calls returns the same text, and copies nothing, where there is nothing to do.
    return {
        name.strip(): value.strip().replace("\r", " ").replace("\n", " ") for name, value in headers.items()
    }
