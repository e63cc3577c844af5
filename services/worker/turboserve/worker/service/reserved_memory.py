"""Memory of the engine that is reserved for an arriving session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from turboserve.worker.engine.backend import ReceiveBuffer
from turboserve.worker.engine.engine import Engine


@dataclass(eq=False)
class ReservedMemory:
    """Memory for an arriving session. Only the engine's thread uses this object."""

    model: str
    """Name of the session's class."""
    buffer: ReceiveBuffer | None = None

    def reserve(self, engine: Engine, on_host: bool) -> ReceiveBuffer:
        self.buffer = engine.reserve(on_host=on_host)
        return self.buffer

    def adopt(self, engine: Engine, header: Mapping[str, Any], pages: Iterable[str], now: float) -> None:
        assert self.buffer is not None
        engine.import_session(self.buffer, header, pages, now)
        self.buffer = None

    def release(self, engine: Engine) -> None:
        if self.buffer is not None:
            engine.release(self.buffer)
            self.buffer = None
