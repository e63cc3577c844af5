"""The engine's part of a move: a session stands still and is read here, is put down and adopted there.

All of it on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import DuplicateSession, UnknownSession
from turboserve.worker.engine.hostpool import size_of
from turboserve.worker.engine.landing import Landing, host_slab
from turboserve.worker.engine.moving import Page, pages_at_rest, pages_in_use, pages_of
from turboserve.worker.engine.session import Freeze, Playhead, Session
from turboserve.worker.engine.snapshot import Snapshot


def freeze(engine: Engine, session: str, quiet_s: float, until_s: float) -> None:
    """Ask the session to stand still at a boundary: `Frozen` says when it does. Raises `UnknownSession`.

    `quiet_s`: not before the next chunk is due only after so long; `until_s`: from then on regardless.
    """
    engine.table.active(session).freezing = Freeze(quiet_s, until_s)


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
    return pages_at_rest(held, engine.config)


def reserve(engine: Engine, *, on_host: bool) -> Landing:
    """Memory for a session that is to come. Raises `SlabsExhausted`; gone again with `release`."""
    table = engine.table
    slab = host_slab(table.pool.layout) if on_host else table.pool.acquire()
    device = slab.keys.device
    models = engine.models
    return Landing(slab, engine.config, models.transformer.rotation, device, models.decoder.cache_bytes)


def release(engine: Engine, landing: Landing) -> None:
    """Let go of memory that no session came into, and that nobody writes to any more."""
    if landing.slab.index >= 0:
        engine.table.pool.release(landing.slab)


def adopt(
    engine: Engine, landing: Landing, header: Mapping[str, Any], names: Iterable[str], now: float
) -> None:
    """Make the session whose pages are in `landing` one of this engine's; it stands still until it is thawed.

    Raises `DuplicateSession`, `SnapshotRejected`, `HostPoolFull`; then `landing` is as before.
    """
    table, name = engine.table, str(header["session"])
    if table.knows(name):
        raise DuplicateSession(name)
    if landing.slab.index < 0:
        _adopt_on_host(engine, landing.snapshot(header, names))
        return
    state = landing.state(header, names)
    session = Session(state, engine.options.max_lead_s, Playhead(reported_at_s=now))
    session.delivered = state.next_chunk
    session.announced = session.frozen = True
    table.sessions[name] = session


def _adopt_on_host(engine: Engine, snapshot: Snapshot) -> None:
    table = engine.table
    extent = table.host.take(size_of(dict(snapshot.tensors)))
    try:
        kept = table.host.tensors(extent, dict(snapshot.tensors))
        for name, tensor in snapshot.tensors.items():
            kept[name].copy_(tensor)
    except BaseException:
        table.host.give_back(extent)
        raise
    table.lay_down(Snapshot(snapshot.header, kept), extent)


def _synchronize(engine: Engine) -> None:
    """What the engine has launched must have been written before another thread reads it."""
    if engine.table.device.type == "cuda":
        torch.cuda.current_stream(engine.table.device).synchronize()
