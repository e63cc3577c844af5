"""What a target receives into, and what it has received."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class ReceiveMemory(Protocol):
    """Memory that is reserved for the session (`engine.receive_buffer.PagedReceiveBuffer`)."""

    def begin(self) -> None:
        """Begin another attempt: drop everything of the earlier ones."""
        ...

    def place(self, name: str, size: int, dtype: str = "", shape: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Memory for a page. Raises `SnapshotRejectedError`."""
        ...

    def check(self, header: Mapping[str, Any], names: Iterable[str]) -> object:
        """Check that header and pages are one state of this model. Raises `SnapshotRejectedError`."""
        ...


@dataclass(frozen=True)
class FetchedState:
    """A state that has arrived, bit for bit."""

    header: Mapping[str, Any]
    pages: tuple[str, ...]
    digest: str
    bytes_copied: int
    """Bytes over all rounds of the last attempt."""
    state_bytes: int
    rounds: int
    seconds: float
    """Seconds since the first attempt began."""
    backend: str

    @property
    def next_chunk(self) -> int:
        return int(self.header["next_chunk"])
