"""The table of subjects on the broker."""

from __future__ import annotations

from collections.abc import Iterator

from turboserve.cli.tables import Cell, Code, Table
from turboserve.subjects import ENDPOINTS, LOGS, TOPICS


def _lines() -> Iterator[tuple[Cell, ...]]:
    for endpoint in ENDPOINTS:
        callers = ", ".join(endpoint.callers)
        yield Code(endpoint.subject), "request", endpoint.request.__name__, callers, endpoint.server
    for topic in TOPICS:
        subject = topic.pattern.format(id="IDENTITY.WORKER" if topic.by_worker else "ID")
        senders, readers = ", ".join(topic.senders), ", ".join(topic.readers)
        yield Code(subject), "hint", topic.message.__name__, senders, readers
    for log in LOGS:
        token = "ID.IDENTITY" if log.by_identity else "ID"
        live = f"live: {', '.join(log.readers)}" if log.readers else ""
        stored = f"stored: {', '.join(log.history_readers)}" if log.history_readers else ""
        readers = "; ".join(part for part in (live, stored) if part)
        yield Code(log.pattern.format(id=token)), f"log `{log.stream}`", "", ", ".join(log.writers), readers


def table() -> Table:
    """Return the table of the documentation."""
    return Table.of(("subject", "kind", "message", "from", "to"), _lines())
