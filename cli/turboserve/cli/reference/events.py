"""The table of events in the log."""

from __future__ import annotations

from typing import get_args

from turboserve.cli.tables import Cell, Code, Table, docstring
from turboserve.contracts.base import Contract
from turboserve.contracts.events import Event

_IN_EVERY = {"id", "at", "type", "record", "worker"}


def types() -> list[tuple[str, type[Contract]]]:
    """Return (value of `type`, contract) of every event."""
    return [(kind.model_fields["type"].default, kind) for kind in get_args(Event)]


def table() -> Table:
    """Return the table of the documentation."""
    lines: list[tuple[Cell, ...]] = []
    for name, kind in types():
        own = tuple(field for field in kind.model_fields if field not in _IN_EVERY)
        lines.append((Code(name), docstring(kind), own))
    return Table.of(("`type`", "when", "fields of its own"), lines)
