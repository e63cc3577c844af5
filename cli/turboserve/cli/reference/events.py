"""The table of events in the log."""

from __future__ import annotations

from typing import get_args

from turboserve.cli.reference.text import code, docstring, rows
from turboserve.contracts.base import Contract
from turboserve.contracts.events import Event

_IN_EVERY = {"id", "at", "type", "record", "worker"}


def types() -> list[tuple[str, type[Contract]]]:
    """Return (value of `type`, contract) of every event."""
    return [(kind.model_fields["type"].default, kind) for kind in get_args(Event)]


def markdown() -> str:
    """Return the table of the documentation."""
    lines = []
    for name, kind in types():
        own = [field for field in kind.model_fields if field not in _IN_EVERY]
        lines.append((f"`{name}`", docstring(kind), code(own)))
    return rows(("`type`", "when", "fields of its own"), lines)
