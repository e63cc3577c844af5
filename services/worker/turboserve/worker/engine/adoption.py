"""The engine's part of a move: a session stands still and is read here, is put down and adopted there.

All of it on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turboserve.worker.engine.backend import ReceiveBuffer
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import DuplicateSession, UnknownSession
from turboserve.worker.engine.moving import Page
from turboserve.worker.engine.session import Freeze, Playhead, Session


def freeze(
    engine: Engine, session: str, now: float, quiet_s: float, patience_s: float, number: int = 0
) -> None:
    """Ask the session to stand still at a boundary: `Frozen` of this number says when it does.

    `quiet_s`: not before the next chunk is due only after so long, or ever less; `patience_s`: after this
    regardless. Raises `UnknownSession`.
    """
    engine.table.active(session).freezing = Freeze(quiet_s, now, patience_s, number)


def thaw(engine: Engine, session: str) -> None:
    """Go on, or forget that it was asked to stand still. Raises `UnknownSession`."""
    held = engine.table.active(session)
    held.freezing, held.frozen = None, False


def read(engine: Engine, session: str) -> Sequence[Page]:
    """Pages of an active session that nothing in work is writing to. Raises `UnknownSession`.

    None while its state is on its way into the slab: what lies there is still another's.
    """
    held = engine.table.active(session)
    if held.transfer is not None:
        return []
    return engine.backend.pages_in_use(held)


def read_at_rest(engine: Engine, session: str) -> tuple[Mapping[str, Any], Sequence[Page]]:
    """Header and all pages of a frozen or suspended session. Raises `UnknownSession`."""
    held = engine.table.sessions.get(session)
    if held is None:
        return engine.backend.pages_of(engine.snapshot(session))
    if not held.frozen:
        raise UnknownSession(session, "frozen")
    return engine.backend.pages_at_rest(held)


def reserve(engine: Engine, *, on_host: bool) -> ReceiveBuffer:
    """Memory for a session that is to come: a slab, or a piece of the host pool, large enough for any state.

    Raises `SlabsExhausted`, `HostPoolFull` or `HostMemoryUnavailable`; given back with `release`.
    """
    return engine.backend.receive_buffer(on_host=on_host)


def release(engine: Engine, landing: ReceiveBuffer) -> None:
    """Let go of memory that no session came into, and that nobody writes to any more."""
    if landing.extent is None:
        engine.table.pool.release(landing.slab)
    else:
        engine.table.host.give_back(landing.extent)


def adopt(
    engine: Engine, landing: ReceiveBuffer, header: Mapping[str, Any], names: Iterable[str], now: float
) -> None:
    """Make the session whose pages are in `landing` one of this engine's, where they are; it stands still
    until it is thawed, or is suspended.

    Raises `DuplicateSession` or `SnapshotRejected`; then `landing` is as before.
    """
    table, name = engine.table, str(header["session"])
    if table.knows(name):
        raise DuplicateSession(name)
    if landing.extent is not None:
        snapshot = landing.snapshot(header, names)
        table.lay_down(snapshot, table.host.shorten(landing.extent, landing.used_bytes))
        return
    state = landing.state(header, names)
    session = Session(state, engine.options.max_lead_s, Playhead(reported_at_s=now))
    session.delivered = state.next_chunk
    session.announced = session.frozen = True
    table.sessions[name] = session
