"""What a source asks of its worker for the transfer of a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from turboserve.worker.engine.state_pages import Page


class StateProvider(Protocol):
    """The worker's interface for its transfers."""

    def key(self, session: str, migration: int) -> bytes | None:
        """The migration's key, from the session's row; `None`: no such migration is known here."""
        ...

    def check(self, session: str, migration: int, target: str) -> None:
        """Check that the target may have the state. Changes nothing.

        Raises `MigrationNotOfferedError`, `SourceNotReadyError` or `NoStateError`.
        """
        ...

    def offer(self, session: str, migration: int, target: str) -> bool:
        """Offer the state to the target. Returns whether the session is suspended, with its state in host
        memory. Raises the errors of `check`."""
        ...

    async def pages(self, session: str) -> Sequence[Page]:
        """The pages that no current work writes to. Raises `NoStateError`."""
        ...

    async def rest(self, session: str, migration: int) -> tuple[Mapping[str, Any], Sequence[Page]]:
        """Quiesce the session at a chunk boundary. Returns its header and all its pages."""
        ...

    async def acknowledged(self, session: str, migration: int, next_chunk: int) -> None:
        """Wait until the log has all chunks before `next_chunk`."""
        ...

    def sending_manifest(self, session: str, migration: int) -> None:
        """From here on the target may own the session: it stays quiesced until its row is read.

        Raises `MigrationNotOfferedError`.
        """
        ...

    def over(self, session: str, migration: int) -> None:
        """The connection has ended in any way."""
        ...
