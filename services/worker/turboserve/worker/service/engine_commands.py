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
class FetchedContext:
    """What remains of a session's newest chunks. None for what is lost."""

    latents: Tensor | None = None
    """Clean latents of consecutive chunks, the oldest first, [frames, C, H, W]."""
    sink: Tensor | None = None
    """Clean latents of the session's first frames, [sink_size, C, H, W]."""
    fidelities: tuple[Fidelity | None, ...] = ()
    """Configuration of each chunk of `latents`."""
    sink_fidelity: Fidelity | None = None
    """Configuration of chunk 0, if `sink` is given."""


@dataclass(frozen=True, eq=False)
class AdmitRequest:
    """`Admit` with what was fetched for it."""

    admit: commands.Admit
    context: FetchedContext = FetchedContext()


@dataclass(frozen=True, eq=False)
class EngineCall:
    """A call on the engine's thread. `future` receives its result."""

    function: Callable[[Engine], Any]
    future: Future[Any]
    model: str = ""
    """Class whose engine the function is called with, where the worker has several."""


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
    | commands.SetConditions
    | commands.SetLimits
    | commands.DropBuffer
    | commands.SetPlayhead
    | commands.GenerateNext
    | commands.GenerateUntil
    | commands.StopGenerating
)
