"""Structured logs, as text or JSON: one line per event.

A line has the service's name, and the ids of the client's request and of the trace, if there are any.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import structlog
from opentelemetry import trace
from structlog.types import EventDict, Processor

from turboserve.config import Settings

REQUEST_HEADER = "Ts-Request-Id"
"""Header of a message on the bus: the id of the client's request that caused it."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", re.ASCII)
_request: ContextVar[str | None] = ContextVar("request", default=None)
_SAME = nullcontext()


def is_request_id(text: str) -> bool:
    """Whether `text` may be the id of a request: at most 64 letters, digits, `.`, `_`, `:` and `-`."""
    return _REQUEST_ID.fullmatch(text) is not None


def request_id() -> str | None:
    """Return the id of the client's request that this code runs for. None: it runs for none, or for many."""
    return _request.get()


def for_request(name: str | None) -> AbstractContextManager[None]:
    """Add the id of a client's request to the log lines and the messages of this block and of its tasks."""
    # Most messages are of no client's request, and are handled where there is none.
    return _SAME if name == _request.get() else _changed(name)


@contextmanager
def _changed(name: str | None) -> Iterator[None]:
    token = _request.set(name)
    try:
        yield
    finally:
        _request.reset(token)


def request_of(headers: Mapping[str, str] | None) -> str | None:
    """Return the id of the client's request that a message names. None: it names none that is valid."""
    name = headers.get(REQUEST_HEADER) if headers else None
    return name if name is not None and is_request_id(name) else None


def setup(service: str, settings: Settings) -> None:
    """Write the records of structlog and of the standard library's logging to stderr, in one format."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _with(service),
        _with_ids,
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
    for noisy in ("nats", "httpx", "uvicorn.access", "asyncio", "aioice", "aiortc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def get(name: str) -> Any:
    """Return a logger: `log.info("event name", key=value)`."""
    return structlog.get_logger(name)


def _with(service: str) -> Processor:
    def add(_logger: Any, _method: str, event: EventDict) -> EventDict:
        return {**event, "service": service}

    return add


def _with_ids(_logger: Any, _method: str, event: EventDict) -> EventDict:
    if (name := _request.get()) is not None:
        event["request_id"] = name
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
    return event


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
