"""Forwards of a backend that may borrow another worker for one session, or be lent to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from turboserve.worker.engine.errors import DonorReleasedError, PartnerLostError
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.sequence_parallel import (
    BorrowedForward,
    Exchange,
    ForwardSpec,
    LentForward,
    LentMemory,
    Split,
)
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.work import Row, RowsForward
from turboserve.worker.model.transformer import CausalWanTransformer

OnBroken = Callable[[Exception], None]


class LentForwards(Protocol):
    """At a donor: its half of the forwards of one loan (`LentForward`)."""

    @property
    def loan(self) -> int: ...

    def __call__(self, spec: ForwardSpec, *, accept: bool = True) -> None:
        """Compute this worker's half of a forward, or end the loan. Raises `PartnerLostError`."""
        ...


class ForwardLoans(Protocol):
    """Forwards that two workers compute together (`ParallelForward`)."""

    def borrow(
        self,
        loan: int,
        state: SessionState,
        announce: Callable[[ForwardSpec], None],
        exchange: Exchange,
        on_broken: OnBroken,
    ) -> None:
        """Split the session's forwards with a donor from the next one on, until `return_donor`.

        `announce` sends a spec to the donor, without waiting. If a forward breaks, it is computed here alone,
        the loan is over, and `on_broken` is called. Raises `SequenceParallelUnavailableError`.
        """
        ...

    def return_donor(self) -> None:
        """End the loan: every forward is computed alone from now on."""
        ...

    def lent_memory(self) -> Any:
        """Allocate memory for one borrowed session. Raises `SequenceParallelUnavailableError`."""
        ...

    def lend(self, loan: int, memory: Any, exchange: Exchange) -> LentForwards:
        """The donor's part of a loan. `memory` serves one loan at a time."""
        ...


class ParallelForward:
    """See `ForwardLoans`. Runs rows on this device, the row of a borrowed session together with a donor.

    Not thread-safe.
    """

    def __init__(self, model: CausalWanTransformer, forward: RowsForward) -> None:
        self._model, self._forward = model, forward
        self.borrowed: BorrowedForward | None = None
        """The loan under way. None: every forward is computed alone."""
        self._on_broken: OnBroken | None = None
        self.split = False
        """See `Backend.split`."""

    def __call__(self, rows: Sequence[Row]) -> list[Tensor]:
        """Flows [F, C, H, W] of rows with equally many frames. A repeated call gives the same result, up to
        the rounding between one worker and two."""
        flows = self._with_donor(rows)
        self.split = bool(flows)
        alone = [row for row in rows if row.ring not in flows]
        if alone:
            flows |= zip((row.ring for row in alone), self._forward(alone).unbind(0), strict=True)
        return [flows[row.ring] for row in rows]

    # At the home

    def borrow(
        self,
        loan: int,
        state: SessionState,
        announce: Callable[[ForwardSpec], None],
        exchange: Exchange,
        on_broken: OnBroken,
    ) -> None:
        """See `ForwardLoans.borrow`."""
        split = Split.of(self._model.config)
        self.borrowed = BorrowedForward(loan, state, self._forward, split, announce, exchange)
        self._on_broken = on_broken

    def return_donor(self) -> None:
        """End the loan: every forward is computed alone from now on. The state is complete here."""
        self.borrowed = self._on_broken = None

    def borrows(self, state: SessionState) -> bool:
        """Whether the session's forwards are split with a donor."""
        return self.borrowed is not None and self.borrowed.ring is state.ring

    # At the donor

    def lent_memory(self) -> LentMemory:
        """Allocate memory for one borrowed session. Raises `SequenceParallelUnavailableError`."""
        return LentMemory(self._model, Split.of(self._model.config))

    def lend(self, loan: int, memory: LentMemory, exchange: Exchange) -> LentForward:
        """The donor's part of a loan. `memory` serves one loan at a time."""
        return LentForward(loan, memory, self._forward, exchange)

    def _with_donor(self, rows: Sequence[Row]) -> dict[KVRing, Tensor]:
        """The flow of the borrowed session's row, if it is among the rows and the donor takes part."""
        borrowed, on_broken = self.borrowed, self._on_broken
        row = next((row for row in rows if borrowed is not None and row.ring is borrowed.ring), None)
        if borrowed is None or row is None:
            return {}
        try:
            return {row.ring: borrowed(row)}
        except Exception as error:
            # The two workers no longer agree on what comes next, whatever the error was.
            self.return_donor()
            if on_broken is not None:
                on_broken(error)
            if isinstance(error, DonorReleasedError | PartnerLostError):
                return {}
            raise
