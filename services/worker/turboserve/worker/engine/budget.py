"""How a worker's memory is shared out at start: the model, workspace, and as many sessions as then fit."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.worker.engine.errors import BudgetTooSmall


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one device. A session takes its slab and its decode cache."""

    total_bytes: int
    model_bytes: int
    workspace_bytes: int
    slab_bytes: int
    decode_cache_bytes: int

    @property
    def session_bytes(self) -> int:
        """What one more session takes."""
        return self.slab_bytes + self.decode_cache_bytes

    def sessions(self) -> int:
        """Sessions that fit. Raises `BudgetTooSmall` when none does."""
        fixed = self.model_bytes + self.workspace_bytes
        count = (self.total_bytes - fixed) // self.session_bytes
        if count < 1:
            raise BudgetTooSmall(fixed + self.session_bytes, self.total_bytes)
        return count
