"""Ids and random tokens, from the current context's randomness source. Only shells make them, never cores."""

from __future__ import annotations

import secrets
import time
from contextvars import ContextVar
from typing import Protocol

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


class RandomnessSource(Protocol):
    """Supplies the time and the random bits of ids and tokens."""

    def milliseconds(self) -> int:
        """Wall-clock time in milliseconds. Ids sort by it, so they sort by creation."""

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
    """Use `source` in the current context and in the tasks created from it."""
    _source.set(source)


def new_id(prefix: str) -> str:
    """Return `prefix_` and 26 characters: 48 bits of milliseconds, then 80 random bits.

    Ids sort by their creation.
    """
    source = _source.get()
    number = (source.milliseconds() << 80) | source.randbits(80)
    return f"{prefix}_" + "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))


def random_bits(bits: int) -> int:
    """Return an integer of `bits` random bits, for seeds."""
    return _source.get().randbits(bits)


def random_token(size: int) -> str:
    """Return `size` random bytes as hexadecimal digits, for keys."""
    return f"{_source.get().randbits(8 * size):0{2 * size}x}"
