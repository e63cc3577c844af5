"""Commands to the thread that owns the engine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.fidelity import Fidelity
from turboserve.worker.service import commands


@dataclass(frozen=True, eq=False)
class AdmitRequest:
    """`Admit` with the latents that were fetched for it."""

    admit: commands.Admit
    latents: Tensor | None = None
    """Clean latents of the newest chunks before `next_chunk`, [frames, C, H, W]. None: lost, or none yet."""
    sink: Tensor | None = None
    fidelities: tuple[Fidelity | None, ...] = ()
    """See `Rebuild.fidelities`."""
    sink_fidelity: Fidelity | None = None
    """See `Rebuild.sink_fidelity`."""


@dataclass(frozen=True, eq=False)
class EngineCall:
    """A call on the engine's thread. `future` receives its result."""

    function: Callable[[Engine], Any]
    future: Future[Any]


EngineCommand = (
    AdmitRequest
    | EngineCall
    | commands.Quiesce
    | commands.Unquiesce
    | commands.Evict
    | commands.Suspend
    | commands.Resume
    | commands.PauseGeneration
    | commands.ResumeGeneration
    | commands.SetPrompt
    | commands.SetLimits
    | commands.DropBuffer
    | commands.SetPlayhead
    | commands.GenerateNext
    | commands.GenerateUntil
    | commands.StopGenerating
)
