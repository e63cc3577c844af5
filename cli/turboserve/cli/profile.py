"""`turboserve profile engine`: measures what every stage of the engine takes, for a worker to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from turboserve.cli.say import failure

app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@app.callback()
def profile() -> None:
    """Measure this machine."""


@app.command()
def engine(
    out: Annotated[Path, typer.Option(help="The file to write, for TURBOSERVE_PROFILE.")],
    batch: Annotated[int, typer.Option(min=1, max=64, help="Largest batch.")] = 8,
    repeats: Annotated[int, typer.Option(min=3, help="Runs of each size; the median counts.")] = 7,
) -> None:
    """Measure the stages of the shipped model by batch size, on one thread of this machine's CPU."""
    # Torch takes seconds to import.
    from turboserve.bench.engine.stages import profile_toyworld

    found = profile_toyworld(batch, repeats)
    try:
        found.write(out)
    except OSError as error:
        raise failure(f"--out: {out} could not be written: {error}") from None
    for stage, seconds in found.stages.items():
        times = ", ".join(f"{size}: {1000 * value:.3g} ms" for size, value in seconds.items())
        typer.echo(f"{stage}: {times}")
