"""Log lines of simulated services: unexpected errors are violations, other lines are dropped.

Also sets the GC, and shares parsed messages between receivers.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from turboserve.simulation.runtime.device.faults import is_device_error
from turboserve.simulation.runtime.process import current
from turboserve.simulation.shared_parsing import shared_parsing
from turboserve.simulation.world import World

RARELY = (70_000, 10, 20)
"""Thresholds of the collector of cyclic garbage."""
SELDOM = (1_000_000, 10, 20)
"""The same without faults: such a run makes almost no cyclic garbage, and has many more objects to search."""


@contextmanager
def quiet(world: World, *, handed_over: bool = False) -> Iterator[None]:
    """Drop the services' log lines, and count unexpected errors as violations.

    Log lines are for operators, and thousands of runs have too many of them. A log line with a traceback is
    an error that the service's code did not expect, thus a violation. Device errors are excepted: the run
    injects them.

    `handed_over`: whether the run has no faults; see `shared_parsing`.

    Cyclic garbage is rare here, so the collector runs a hundred times less often than Python's default, and
    even less often without faults.
    """

    def unexpected(event: str, exc_info: Any) -> None:
        process, error = current(), _error(exc_info)
        if (process is None or process.alive) and not is_device_error(error):
            name = "the world" if process is None else process.name
            world.checker.fail("no_core_fails", f"{name}: {event}: {error!r}")

    class Quiet(_BaseLogger):
        def error(self, event: str, **fields: Any) -> None:
            if fields.get("exc_info"):
                unexpected(event, fields["exc_info"])

        def exception(self, event: str, **fields: Any) -> None:
            unexpected(event, fields.get("exc_info", True))

    before = structlog.get_config()
    # Structlog creates a logger for each line, so creation must be cheap.
    structlog.configure(
        processors=[],
        wrapper_class=Quiet,  # type: ignore[arg-type]
        context_class=dict,
        logger_factory=lambda *_: None,
        cache_logger_on_first_use=False,
    )
    thresholds = gc.get_threshold()
    # Frozen by the process itself, as pytest's are: only all objects can be unfrozen together.
    frozen = gc.get_freeze_count() > 0
    if not frozen:
        gc.freeze()
    gc.set_threshold(*(SELDOM if handed_over else RARELY))
    try:
        with shared_parsing(handed_over=handed_over):
            yield
    finally:
        gc.set_threshold(*thresholds)
        if not frozen:
            gc.unfreeze()
        structlog.configure(**before)


class _BaseLogger:
    """Drops log lines below the level error."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept the arguments with which structlog creates a logger."""

    def debug(self, event: str, **fields: Any) -> None: ...

    info = warning = debug


def _error(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        error: BaseException | None = exc_info[1]
        return error
    return sys.exc_info()[1]
