"""The delay before a repetition, which doubles with every failure in a row.

Retry libraries (tenacity, stamina) make the repeated calls and sleep in between. Here, pure cores decide when
a command is repeated and need only the delay.
"""

from __future__ import annotations

DOUBLINGS = 64
"""Exponent from which on the delay no longer grows: the power of any number of failures would overflow."""


def backoff_s(failures: int, first_s: float, limit_s: float) -> float:
    """Return the delay after `failures` failures in a row, in seconds.

    0 without a failure, `first_s` after the first one, then twice the previous delay, at most `limit_s`.
    """
    return 0.0 if failures < 1 else min(first_s * 2.0 ** min(failures - 1, DOUBLINGS), limit_s)
