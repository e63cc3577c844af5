"""Progress of a long run on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from turboserve.experiments.slack.cells import Cell


@contextmanager
def progress_bar(most: int) -> Iterator[Callable[[Cell], None]]:
    """Show a bar on the standard error, if that is a terminal. Yields the function to call for each cell.

    `most`: largest number of cells. A bisection that ends early leaves some of them out.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=most)

        def done(cell: Cell) -> None:
            text = f"{cell.workload} {cell.policy} rate {cell.rate:g} seed {cell.seed}"
            progress.update(task, advance=1, description=text)

        yield done
