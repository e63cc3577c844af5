"""How often a shipped model draws what its prompt describes, before and after a switch."""

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
    model: Annotated[str, typer.Option(help="Model that ships: toyworld or toyworld-small.")] = "toyworld",
) -> dict[str, Any]:
    """Measure how often a shipped model draws what its prompt describes, before and after a switch."""
    from turboserve.experiments.toyworld import cost, quality
    from turboserve.worker.model.load import UnreadableCheckpointError
    from turboserve.worker.model.presets import UnknownPresetError

    try:
        result = quality.run(full, seed, model)
        if model != "toyworld":
            result["cost_beside_toyworld"] = cost.beside_toyworld(model)
        return result
    except (UnreadableCheckpointError, UnknownPresetError) as error:
        raise BenchError(str(error)) from error


def table(result: dict[str, Any]) -> str:
    """Format the result."""
    from turboserve.experiments.toyworld import quality

    text = quality.table(result)
    if (ratio := result.get("cost_beside_toyworld")) is not None:
        text += f"\nprocessor time of a chunk, relative to toyworld's: {ratio:.2f}"
    return text
