"""Formats Markdown tables, and docstrings for use in them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable


def rows(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table. Cells are Markdown without line breaks."""
    columns = list(header)
    cells = [columns, ["---"] * len(columns), *map(list, lines)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in cells)


def code(names: Iterable[str]) -> str:
    """Format names as Markdown code, separated by commas, in the given order."""
    return ", ".join(f"`{name}`" for name in names)


def docstring(source: object) -> str:
    """Return the docstring as one line. Empty if `source` has no docstring of its own."""
    own = getattr(source, "__doc__", None) or ""
    return " ".join(inspect.cleandoc(own).split())
