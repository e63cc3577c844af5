"""The engine's part of a move: a session stands still and is read here, is put down and adopted there.

All of it on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import DuplicateSession, UnknownSession
from turboserve.worker.engine.landing import Landing, host_room, own_limit
from turboserve.worker.engine.moving import Page, pages_at_rest, pages_in_use, pages_of
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
    _synchronize(engine)
    return pages_in_use(held, engine.config)


def read_at_rest(engine: Engine, session: str) -> tuple[Mapping[str, Any], Sequence[Page]]:
    """Header and all pages of a frozen or suspended session. Raises `UnknownSession`."""
    held = engine.table.sessions.get(session)
    if held is None:
        return pages_of(engine.snapshot(session), engine.config)
    if not held.frozen:
        raise UnknownSession(session, "frozen")
    _synchronize(engine)
    return pages_at_rest(held, engine.config, engine.fingerprint)


def reserve(engine: Engine, *, on_host: bool) -> Landing:
    """Memory for a session that is to come: a slab, or a piece of the host pool, large enough for any state.

    Raises `SlabsExhausted`, `HostPoolFull` or `HostMemoryUnavailable`; given back with `release`.
    """
    table, models, config = engine.table, engine.models, engine.config
    own_bytes = own_limit(config, models.decoder.cache_bytes)
    rotation = models.transformer.rotation
    if not on_host:
        return Landing(table.pool.acquire(), config, engine.fingerprint, rotation, table.device, own_bytes)
    room = host_room(table.host, table.pool.layout, own_bytes)
    return Landing(room.slab, config, engine.fingerprint, rotation, table.device, own_bytes, room)


def release(engine: Engine, landing: Landing) -> None:
    """Let go of memory that no session came into, and that nobody writes to any more."""
    if landing.room is None:
        engine.table.pool.release(landing.slab)
    else:
        engine.table.host.give_back(landing.room.extent)


def adopt(
    engine: Engine, landing: Landing, header: Mapping[str, Any], names: Iterable[str], now: float
) -> None:
    """Make the session whose pages are in `landing` one of this engine's, where they are; it stands still
    until it is thawed, or is suspended.

    Raises `DuplicateSession` or `SnapshotRejected`; then `landing` is as before.
    """
    table, name = engine.table, str(header["session"])
    if table.knows(name):
        raise DuplicateSession(name)
    if landing.room is not None:
        snapshot = landing.snapshot(header, names)
        table.lay_down(snapshot, table.host.shorten(landing.room.extent, landing.room.used_bytes))
        return
    state = landing.state(header, names)
    session = Session(state, engine.options.max_lead_s, Playhead(reported_at_s=now))
    session.delivered = state.next_chunk
    session.announced = session.frozen = True
    table.sessions[name] = session


def _synchronize(engine: Engine) -> None:
    """What the engine has launched must have been written before another thread reads it."""
    if engine.table.device.type == "cuda":
        torch.cuda.current_stream(engine.table.device).synchronize()
