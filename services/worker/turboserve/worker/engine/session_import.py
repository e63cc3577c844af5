"""The engine's part of a migration: quiesce and read a session at the source, import it at the target.

All functions run on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turboserve.worker.engine.backend import ReceiveBuffer
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import DuplicateSessionError, UnknownSessionError
from turboserve.worker.engine.moving import Page
from turboserve.worker.engine.session import Playhead, QuiesceRequest, Session


def quiesce(
    engine: Engine, session: str, now: float, quiet_s: float, patience_s: float, number: int = 0
) -> None:
    """Request that the session be quiesced at a boundary; `SessionQuiesced` with this number reports it.

    `quiet_s`: idle window before the next chunk is due, which shrinks to zero over `patience_s`. Raises
    `UnknownSessionError`.
    """
    engine.table.active(session).quiesce_request = QuiesceRequest(quiet_s, now, patience_s, number)


def unquiesce(engine: Engine, session: str) -> None:
    """Continue the session, or withdraw the request to quiesce it. Raises `UnknownSessionError`."""
    held = engine.table.active(session)
    held.quiesce_request, held.quiesced = None, False


def read(engine: Engine, session: str) -> Sequence[Page]:
    """Pages of an active session that no current work writes to. Raises `UnknownSessionError`.

    Empty while the session's state is being transferred: the slab may still have another session's contents.
    """
    held = engine.table.active(session)
    if held.transfer is not None:
        return []
    return engine.backend.pages_in_use(held)


def read_quiesced(engine: Engine, session: str) -> tuple[Mapping[str, Any], Sequence[Page]]:
    """Header and all pages of a quiesced or suspended session. Raises `UnknownSessionError`."""
    held = engine.table.sessions.get(session)
    if held is None:
        return engine.backend.pages_of(engine.snapshot(session))
    if not held.quiesced:
        raise UnknownSessionError(session, "quiesced")
    return engine.backend.pages_quiesced(held)


def reserve(engine: Engine, *, on_host: bool) -> ReceiveBuffer:
    """Reserve memory for any arriving session: a slab, or a piece of the host pool.

    Raises `SlabsExhaustedError`, `HostPoolFullError` or `HostMemoryUnavailableError`. `release` frees it.
    """
    return engine.backend.receive_buffer(on_host=on_host)


def release(engine: Engine, buffer: ReceiveBuffer) -> None:
    """Free a buffer that received no session, and that no transfer writes to any more."""
    if buffer.extent is None:
        engine.table.pool.release(buffer.slab)
    else:
        engine.table.host.give_back(buffer.extent)


def import_session(
    engine: Engine, buffer: ReceiveBuffer, header: Mapping[str, Any], names: Iterable[str], now: float
) -> None:
    """Import the session in `buffer`, in place. It stays quiesced until it is unquiesced, or is suspended.

    Raises `DuplicateSessionError` or `SnapshotRejectedError`; then `buffer` is as before.
    """
    table, name = engine.table, str(header["session"])
    if table.knows(name):
        raise DuplicateSessionError(name)
    if buffer.extent is not None:
        snapshot = buffer.snapshot(header, names)
        table.lay_down(snapshot, table.host.shorten(buffer.extent, buffer.used_bytes))
        return
    state = buffer.state(header, names)
    session = Session(state, engine.options.max_lead_s, Playhead(reported_at_s=now))
    session.delivered = state.next_chunk
    session.announced = session.quiesced = True
    table.sessions[name] = session
