"""Progress of long commands, on stderr, so that results on stdout stay readable by programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float], None]
"""Sets the finished part of the work."""


@contextmanager
def progress(description: str, total: float | None = None) -> Iterator[Advance]:
    """Show a bar while the block runs, or without `total` a spinner with the time so far.

    Shows nothing if stderr is not a terminal. The bar disappears with the block.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(description, total=total)
        yield lambda completed: shown.update(task, completed=completed)
