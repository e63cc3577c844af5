"""Commands of the session table for the transfer of a migrating session's state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SendFinalDelta:
    """Let the target have the rest of the state: the session is quiesced."""

    session: str
    migration: int


@dataclass(frozen=True)
class SendManifest:
    """Let the target have the manifest: the log has all chunks before `next_chunk`."""

    session: str
    migration: int
    next_chunk: int


@dataclass(frozen=True)
class CancelTransfer:
    """Send nothing more to the target."""

    session: str


@dataclass(frozen=True)
class FetchState:
    """Reserve memory for the session and copy its state into it; answer with `StateReceived` or
    `StateFetchFailed`."""

    session: str
    run: int
    migration: int
    source: tuple[str, ...]
    """Addresses of the source."""
    on_host: bool
    traceparent: str | None = None
    """Trace context of the row's migration. None: not traced."""


@dataclass(frozen=True)
class CancelFetch:
    """End the copy and release what it has received."""

    session: str
    run: int


MigrationCommand = SendFinalDelta | SendManifest | CancelTransfer | FetchState | CancelFetch
