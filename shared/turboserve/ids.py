"""Ids: a prefix that says what it is, then time-ordered randomness. Made in shells, never in cores."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """`prefix_` and 26 characters: 48 bits of milliseconds, then 80 random bits, in order of creation."""
    number = (int(time.time() * 1000) << 80) | secrets.randbits(80)
    return f"{prefix}_" + "".join(_ALPHABET[(number >> shift) & 31] for shift in range(125, -1, -5))
