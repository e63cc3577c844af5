"""What simulated services log, of which only what no service expects is kept; and their memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from turboserve.bench.runtime.device.faults import is_device_error
from turboserve.bench.runtime.process import current

if TYPE_CHECKING:
    from turboserve.bench.simulate.world import World

RARELY = (70_000, 10, 20)
"""Thresholds of the collector of cyclic garbage."""


@contextmanager
def quiet(world: World) -> Iterator[None]:
    """Services' log lines are for operators, and thousands of runs have too many of them.

    Cyclic garbage is rare here, so it is looked for a hundred times less often than Python does.

    What a service logs with a traceback is an error that its code did not expect: a violation. A device error
    is one that the run has ordered.
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
    # A logger is made for each line: nothing of it may be dear.
    structlog.configure(
        processors=[],
        wrapper_class=Quiet,  # type: ignore[arg-type]
        context_class=dict,
        logger_factory=lambda *_: None,
        cache_logger_on_first_use=False,
    )
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        structlog.configure(**before)


class _BaseLogger:
    """Takes what is below an error, and does nothing with it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """As structlog makes one."""

    def debug(self, event: str, **fields: Any) -> None: ...

    info = warning = debug


def _error(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        error: BaseException | None = exc_info[1]
        return error
    return sys.exc_info()[1]
