"""`turboserve trace …`: draw traces to published statistics, and check trace files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from turboserve.cli.errors import failure
from turboserve.cli.progress import progress
from turboserve.wording import counted

app = typer.Typer(help="Draw and check traces of sessions' changes.", no_args_is_help=True)
Window = Annotated[
    float | None,
    typer.Option(help="Length of a published window, in seconds. The default is the inferred length."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.callback()
def trace() -> None:
    """Draw and check traces of sessions' changes."""


@app.command()
def draw(
    name: Annotated[str, typer.Argument(help="Published trace: M, or T1 to T6.")],
    out: Annotated[Path, typer.Option(help="CSV file to write.")],
    seed: Annotated[int, typer.Option(min=0, help="Number of the draw.")] = 0,
    window: Window = None,
    as_json: AsJson = False,
) -> None:
    """Draw a trace with the arrivals, departures and mean active sessions of TurboServe's Tables 11 and 12.

    Every published number is met within 3 %.
    """
    # numpy takes a while to import.
    with progress("loading"):
        from turboserve.experiments.autoscale.production import production
        from turboserve.experiments.autoscale.trace import write

    with _failures("--out"), progress(f"drawing {name}"):
        drawn = production(name, seed, window)
        write(drawn, out)
    if as_json:
        result = {"file": str(out), "digest": drawn.digest, "events": len(drawn.steps), "peak": drawn.peak}
        typer.echo(json.dumps(result))
        return
    events, peak = counted(len(drawn.steps), "event"), counted(drawn.peak, "active session")
    typer.echo(f"{out}: {drawn.digest}, {events}, peak of {peak}")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="CSV file with time_s,session,event.")],
    published: Annotated[
        str | None, typer.Option(help="Compare with the statistics of this published trace: M, or T1 to T6.")
    ] = None,
    window: Window = None,
    as_json: AsJson = False,
) -> None:
    """Check a trace file and, with --published, its statistics by window.

    Exits with 1 if the file is not a trace, or if a statistic differs by more than 3 %.
    """
    from rich.console import Console
    from rich.table import Table

    from turboserve.experiments.autoscale import published as tables
    from turboserve.experiments.autoscale.trace import read

    with _failures("FILE"):
        found = read(file)
        wanted = None if published is None else tables.published(published, window)
        rows = [] if wanted is None else tables.differences(found, wanted)
    outside = sum(not row.within for row in rows)
    if as_json:
        result = {"file": str(file), "digest": found.digest, "events": len(found.steps), "peak": found.peak}
        statistics = [{**asdict(row), "within": row.within} for row in rows]
        typer.echo(json.dumps({**result, "ends_s": found.ends_s, "statistics": statistics}))
        _refuse(outside, len(rows))
        return
    events, peak = counted(len(found.steps), "event"), counted(found.peak, "active session")
    typer.echo(f"{file.name}: {found.digest}, {events} until {found.ends_s:g} s, peak of {peak}")
    if wanted is None:
        return
    shown = Table("window", "statistic", "published", "found", "difference", box=None, pad_edge=False)
    for row in rows:
        shown.add_row(
            str(row.window), row.statistic, f"{row.published:g}", f"{row.found:.5g}", f"{row.share:+.1%}"
        )
    Console().print(shown)
    _refuse(outside, len(rows))


def _refuse(outside: int, of: int) -> None:
    """End the command with an error if any statistic is outside of the tolerance."""
    from turboserve.experiments.autoscale.published import TOLERANCE

    if outside:
        differ = counted(outside, f"of {of} statistics differs", f"of {of} statistics differ")
        raise failure(f"{differ} by more than {TOLERANCE:.0%}")


@app.command()
def schema() -> None:
    """Print the Table Schema (Frictionless Data) of trace files."""
    from turboserve.cli.reference.api_documents import text_of
    from turboserve.experiments.autoscale.trace import table_schema

    typer.echo(text_of(table_schema()), nl=False)


@contextmanager
def _failures(where: str) -> Iterator[None]:
    """Report errors of the input and of the file, and end the command."""
    from turboserve.bench.report import BenchError
    from turboserve.contracts.errors import InvalidInputError

    try:
        yield
    except InvalidInputError as error:
        limit = f" (limit {error.limit})" if error.limit else ""
        raise failure(f"{error.field}: {error.detail}{limit}") from None
    except BenchError as error:
        raise failure(str(error)) from None
    except OSError as error:
        raise failure(f"{where}: {error}") from None
