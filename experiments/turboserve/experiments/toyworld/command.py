"""How often the shipped model draws what its prompt describes, before and after a switch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from turboserve.bench.report import BenchError


def run(
    full: Annotated[
        bool,
        typer.Option(
            "--full", help="Use all held-out prompts. The default is a sample that takes under a minute."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise and of the choice of prompts.")] = 0,
) -> dict[str, Any]:
    """Measure how often the shipped model draws what its prompt describes, before and after a switch."""
    from turboserve.experiments.toyworld import quality
    from turboserve.worker.model.load import UnreadableCheckpointError

    try:
        return quality.run(full, seed)
    except UnreadableCheckpointError as error:
        raise BenchError(str(error)) from error


def table(result: dict[str, Any]) -> str:
    """Format the result."""
    from turboserve.experiments.toyworld import quality

    return quality.table(result)
