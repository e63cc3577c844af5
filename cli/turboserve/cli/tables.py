"""Tables of the documentation, as Markdown and as JSON, and docstrings for use in them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass


class Code(str):
    """A cell that is one name or value of code."""

    __slots__ = ()


Cell = str | tuple[str, ...]
"""Markdown without line breaks, or names of code."""


@dataclass(frozen=True)
class Table:
    """A table of the documentation."""

    header: tuple[str, ...]
    lines: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, header: Iterable[str], lines: Iterable[Iterable[Cell]]) -> Table:
        return cls(tuple(header), tuple(tuple(line) for line in lines))

    def markdown(self) -> str:
        """Return the table as Markdown."""
        rows = [self.header, ("---",) * len(self.header), *self.lines]
        return "\n".join(f"| {' | '.join(_markdown(cell) for cell in row)} |" for row in rows)

    def records(self) -> list[dict[str, str | list[str]]]:
        """Return one object for each line, for JSON. The keys are the columns' names in snake case."""
        keys = [re.sub(r"\W+", "_", name).strip("_") for name in self.header]
        return [dict(zip(keys, map(_json, line), strict=True)) for line in self.lines]


def _markdown(cell: Cell) -> str:
    if isinstance(cell, tuple):
        text = ", ".join(f"`{name}`" for name in cell)
    else:
        text = f"`{cell}`" if isinstance(cell, Code) else cell
    return text.replace("|", "/")


def _json(cell: Cell) -> str | list[str]:
    return list(cell) if isinstance(cell, tuple) else str(cell)


def docstring(source: object) -> str:
    """Return the docstring as one line. Empty if `source` has no docstring of its own."""
    own = getattr(source, "__doc__", None) or ""
    return " ".join(inspect.cleandoc(own).split())
