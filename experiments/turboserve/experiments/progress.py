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


@contextmanager
def progress_bar(most: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on the standard error, if that is a terminal.

    Yields the function to call with the description of each finished part. `most`: largest number of parts.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=most)

        def done(text: str) -> None:
            progress.update(task, advance=1, description=text)

        yield done
