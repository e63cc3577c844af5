"""Logs and telemetry of simulated services: only what no service expects is kept, and the checker sees it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from turboserve.bench.runtime.process import current

if TYPE_CHECKING:
    from turboserve.bench.simulate.world import World


@contextmanager
def quiet(world: World) -> Iterator[None]:
    """Services' log lines are for operators, and thousands of runs have too many of them.

    What a service logs with a traceback is an error that its code did not expect: a violation.
    """

    def unexpected(_logger: Any, _method: str, event: dict[str, Any]) -> str:
        process = current()
        if event.get("exc_info") and (process is None or process.alive):
            name = "the world" if process is None else process.name
            world.checker.fail("no_core_fails", f"{name}: {event.get('event')}: {_error(event['exc_info'])}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[unexpected],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _error(exc_info: Any) -> str:
    if isinstance(exc_info, BaseException):
        return repr(exc_info)
    if isinstance(exc_info, tuple):
        return repr(exc_info[1])
    import sys

    return repr(sys.exc_info()[1])
