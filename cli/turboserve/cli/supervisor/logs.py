"""Merges the output of all processes into one stream with service names, and into one file per service."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal, TextIO

from turboserve.wording import counted

LogFormat = Literal["text", "json"]

FILE_BYTES = 10 * 2**20
FILES_KEPT = 3
QUEUED_LINES = 10_000
NAME_WIDTH = 11
SUPERVISOR = "up"
SERVERS = frozenset({"nats", "redis", "postgres"})

_COLOURS = {
    SUPERVISOR: "1;37",
    "gateway": "36",
    "scheduler": "33",
    "autoscaler": "35",
    "worker": "32",
    "state-store": "34",
    "recorder": "31",
    "webhooks": "91",
}
_LEVEL_COLOURS = {"warning": "33", "error": "31", "critical": "1;31"}
_SERVER_TROUBLE = re.compile(r"\[(ERR|FTL)\]|^(ERROR|FATAL|PANIC|WARNING):|^\d+:[A-Z] .* # |^guard: ")
_SERVER_HARMLESS = re.compile(r"overcommit_memory|ready to exit|User requested shutdown")


class LineFormat:
    """How a line of a process is shown."""

    def __init__(self, *, coloured: bool) -> None:
        self._coloured = coloured

    def json(self, name: str, text: str) -> str:
        """Return the line as one JSON object: as the process wrote it, if that is one."""
        return text if parse(text) is not None else json.dumps(_record(name, server_level(text), text))

    def text(self, name: str, text: str) -> str:
        """Return the line for people, with the name of its process."""
        record = parse(text)
        if record is None:
            return self._prefix(name) + text
        shown = {
            k: v for k, v in record.items() if k not in ("event", "level", "timestamp", "service", "logger")
        }
        trouble = shown.pop("exception", None)
        level = str(record.get("level", "info"))
        parts = [clock(record["timestamp"])] if record.get("timestamp") else []
        if level not in ("info", "debug"):
            parts.append(self._colour(level.upper(), _LEVEL_COLOURS.get(level, "0")))
        parts.append(str(record.get("event", "")))
        parts += [f"{self._colour(key, '2')}={value}" for key, value in shown.items()]
        lines = [" ".join(parts)]
        if trouble:
            lines += str(trouble).splitlines()
        return "\n".join(self._prefix(name) + line for line in lines)

    def _prefix(self, name: str) -> str:
        return self._colour(f"{name:<{NAME_WIDTH}} │ ", _COLOURS.get(name, "2"))

    def _colour(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._coloured else text


class LogHub:
    """Takes lines from every process. Writes files at once, and the console from its own thread.

    A slow console never blocks the stack. It loses lines, and shows the number of lost lines.
    """

    def __init__(self, directory: Path, log_format: LogFormat, console: TextIO | None = None) -> None:
        self._directory = directory
        self._format = log_format
        self._console = console or sys.stdout
        coloured = log_format == "text" and wants_colour(self._console, os.environ)
        self._shown = LineFormat(coloured=coloured)
        self._files: dict[str, RotatingFileHandler] = {}
        self._queue: queue.Queue[str | None] = queue.Queue(QUEUED_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    def line(self, name: str, text: str) -> None:
        """Take one line of output of process `name`."""
        record = parse(text)
        if record is not None and isinstance(record.get("service"), str):
            # A worker's lines arrive through the pipe of the autoscaler that started the worker.
            name = record["service"]
        self._to_file(name, text)
        if self._format == "json":
            self._to_console(self._shown.json(name, text))
        elif record is not None or name.partition("-")[0] not in SERVERS or server_level(text) != "info":
            self._to_console(self._shown.text(name, text))

    def log(self, event: str, level: str = "info", **fields: Any) -> None:
        """Log an event of the supervisor itself."""
        self.line(SUPERVISOR, json.dumps(_record(SUPERVISOR, level, event, **fields)))

    def plain(self, text: str) -> None:
        """Print text for people. Ignored if the console shows JSON."""
        if self._format == "text":
            self._to_console(text)

    def close(self) -> None:
        """Write the queued lines, for at most two seconds, and close the files."""
        self._queue.put(None)
        self._thread.join(2.0)
        for handler in self._files.values():
            handler.close()

    def _to_file(self, name: str, text: str) -> None:
        handler = self._files.get(name)
        if handler is None:
            handler = _File(
                self._directory / f"{Path(name).name}.log",
                maxBytes=FILE_BYTES,
                backupCount=FILES_KEPT,
                # Open the file with the first line, so that an error is handled like an error of writing.
                delay=True,
            )
            self._files[name] = handler
        handler.emit(logging.LogRecord(name, logging.INFO, "", 0, text, None, None))

    def _to_console(self, text: str) -> None:
        try:
            if self._lost:
                self._queue.put_nowait(f"({counted(self._lost, 'line')} omitted: the console was too slow)")
                self._lost = 0
            self._queue.put_nowait(text)
        except queue.Full:
            self._lost += 1

    def _write(self) -> None:
        while (text := self._queue.get()) is not None:
            try:
                self._console.write(text + "\n")
                if self._queue.empty():
                    self._console.flush()
            except (OSError, ValueError):
                # The console was closed. The files are still written.
                continue


def parse(text: str) -> dict[str, Any] | None:
    """Parse a line as a structured record. Returns None if it is not one."""
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "event" in record else None


def server_level(text: str) -> str:
    """Return the level of a server's line: `warning` or `info`. Lines of level `info` go to files only."""
    return "warning" if _SERVER_TROUBLE.search(text) and not _SERVER_HARMLESS.search(text) else "info"


def clock(timestamp: object) -> str:
    """Format an ISO time as local hours, minutes, seconds and milliseconds. Keeps invalid times unchanged."""
    try:
        return datetime.fromisoformat(str(timestamp)).astimezone().strftime("%H:%M:%S.%f")[:-3]
    except ValueError:
        return str(timestamp)


def wants_colour(console: TextIO, environment: Mapping[str, str]) -> bool:
    if environment.get("NO_COLOR"):
        return False
    return bool(environment.get("FORCE_COLOR")) or (console.isatty() and environment.get("TERM") != "dumb")


def _record(service: str, level: str, event: str, **fields: Any) -> dict[str, Any]:
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "level": level,
        "service": service,
        "event": event,
        **fields,
    }


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore the error: a full disk must not flood the console."""
