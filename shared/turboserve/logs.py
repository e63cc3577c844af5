"""Structured logs: one line per event, with the service's name, as text or JSON."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import structlog
from structlog.types import EventDict, Processor

from turboserve.config import Settings


def setup(service: str, settings: Settings) -> None:
    """Write the records of structlog and of the standard library's logging to stderr, in one format."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _with(service),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(settings.log_level)),
        cache_logger_on_first_use=True,
    )
    last: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if settings.log_format == "json":
        last += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        last += [_plain]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=[*shared, _foreign_extras], processors=last)
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level)
    for noisy in ("nats", "httpx", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def get(name: str) -> Any:
    """Return a logger: `log.info("event name", key=value)`."""
    return structlog.get_logger(name)


def _with(service: str) -> Processor:
    def add(_logger: Any, _method: str, event: EventDict) -> EventDict:
        return {**event, "service": service}

    return add


def _foreign_extras(_logger: Any, _method: str, event: EventDict) -> EventDict:
    record = event.get("_record")
    return {**event, "logger": record.name} if record is not None else event


def _plain(_logger: Any, _method: str, event: EventDict) -> str:
    """Render time, level and event, then key=value pairs. The supervisor prefixes the service's name."""
    event = dict(event)
    event.pop("service", None)
    event.pop("logger", None)
    trouble = event.pop("exc_info", None)
    head = (
        f"{str(event.pop('timestamp', ''))[11:23]} {event.pop('level', 'info'):<7} {event.pop('event', '')}"
    )
    line = " ".join([head, *(f"{key}={value}" for key, value in event.items())])
    if trouble:
        error = (
            sys.exc_info()[1] if trouble is True else trouble[1] if isinstance(trouble, tuple) else trouble
        )
        line += "\n" + "".join(traceback.format_exception(error)).rstrip()
    return line
