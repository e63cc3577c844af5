"""Ids and random tokens, from the current context's randomness source. Made in shells, never in cores."""

from __future__ import annotations

import secrets
import time
from contextvars import ContextVar
from typing import Protocol

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


class RandomnessSource(Protocol):
    """What ids and tokens are made of."""

    def milliseconds(self) -> int:
        """Wall-clock time, which orders ids by their creation."""

    def randbits(self, bits: int) -> int:
        """An integer of `bits` random bits."""


class SystemRandomness:
    """The operating system's clock and its cryptographically secure generator."""

    def milliseconds(self) -> int:
        return int(time.time() * 1000)

    def randbits(self, bits: int) -> int:
        return secrets.randbits(bits)


_source: ContextVar[RandomnessSource] = ContextVar("randomness", default=SystemRandomness())  # noqa: B039


def use_source(source: RandomnessSource) -> None:
    """Draw from `source` in the current context and in the tasks that are created in it."""
    _source.set(source)


def new_id(prefix: str) -> str:
    """`prefix_` and 26 characters: 48 bits of milliseconds, then 80 random bits, in order of creation."""
    source = _source.get()
    number = (source.milliseconds() << 80) | source.randbits(80)
    return f"{prefix}_" + "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def random_bits(bits: int) -> int:
    """An integer of `bits` random bits, for seeds."""
    return _source.get().randbits(bits)


def random_token(size: int) -> str:
    """`size` random bytes as hexadecimal digits, for keys."""
    return f"{_source.get().randbits(8 * size):0{2 * size}x}"
