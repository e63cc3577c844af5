"""The term in which this process runs a pool that several autoscalers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PoolTerm:
    """The right of this process to run the pool."""

    pool: str
    number: int | None
    """The term, which every request to the state store carries. None: no other autoscaler shares the pool."""
    leads: Callable[[float], bool]
    """Whether this process may still decide in the term, at a monotonic time in seconds."""
    on_lost: Callable[[], None]
    """Called when the state store reports that the term is over."""

    @property
    def fence(self) -> dict[str, Any]:
        """The fields that requests to the state store carry: see `PoolFenced`."""
        return {} if self.number is None else {"pool": self.pool, "pool_term": self.number}


UNSHARED = PoolTerm("", None, lambda now: True, lambda: None)
"""Of the only autoscaler of a pool."""
