"""Markdown tables, and what documentation takes from docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterable


def rows(header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table. Cells are Markdown without line breaks."""
    columns = list(header)
    cells = [columns, ["---"] * len(columns), *map(list, lines)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in cells)


def code(names: Iterable[str]) -> str:
    """Names in the text's order, each as code."""
    return ", ".join(f"`{name}`" for name in names)


def docstring(source: object) -> str:
    """The docstring as one line; empty without one of its own."""
    own = getattr(source, "__doc__", None) or ""
    return " ".join(inspect.cleandoc(own).split())
