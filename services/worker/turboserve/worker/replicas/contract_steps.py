"""Steps of the checks of a model: run an engine until something has happened, and fail with a reason."""

from __future__ import annotations

import time
from collections.abc import Sequence

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import (
    ChunkReady,
    ControlApplied,
    Event,
    SessionEnded,
    SessionFailed,
    SessionQuiesced,
)

SESSION = "contract"
"""Name of the session in each engine."""


class ModelContractError(AssertionError):
    """The model breaks a rule of the engine. The message names the check."""

    def __init__(self, check: str, reason: str) -> None:
        super().__init__(f"{check}: {reason}")
        self.check = check
        self.reason = reason


def chunks(engine: Engine, count: int, applied: list[ControlApplied] | None = None) -> list[ChunkReady]:
    """Step until the session has delivered this number of chunks."""
    made: list[ChunkReady] = []
    while len(made) < count:
        for event in step(engine):
            if isinstance(event, ChunkReady):
                made.append(event)
            elif isinstance(event, ControlApplied) and applied is not None:
                applied.append(event)
    return made


def until(engine: Engine, kind: type[Event]) -> list[Event]:
    """Step until an event of this kind, and return all events."""
    events: list[Event] = []
    while not any(isinstance(event, kind) for event in events):
        events += step(engine)
    return events


def migrate(source: Engine, target: Engine) -> list[ChunkReady]:
    """Migrate the session at its next boundary. Returns the chunks that the source delivers until then."""
    source.quiesce(SESSION, time.monotonic(), 0.0, 0.0)
    events = until(source, SessionQuiesced)
    header, pages = source.export_session(SESSION)
    buffer = target.reserve(on_host=False)
    for page in pages:
        places = buffer.place(page.name, page.size, page.dtype, page.shape)
        for place, part in zip(places, page.parts, strict=True):
            place.copy_(part)
    target.import_session(buffer, header, [page.name for page in pages], time.monotonic())
    source.evict(SESSION)
    target.unquiesce(SESSION)
    return [event for event in events if isinstance(event, ChunkReady)]


def step(engine: Engine) -> Sequence[Event]:
    """Step once. Raises ModelContractError if the session ends."""
    events = engine.step(time.monotonic())
    for event in events:
        if isinstance(event, SessionFailed | SessionEnded):
            raise ModelContractError(
                "engine", event.error if isinstance(event, SessionFailed) else event.reason
            )
    return events


def require(check: str, holds: bool, reason: str) -> None:
    """Raise ModelContractError unless `holds`."""
    if not holds:
        raise ModelContractError(check, reason)
