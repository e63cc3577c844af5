"""`turboserve profile …`: measure latencies and quality, and find the autoscaler's parameters."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from turboserve.cli.errors import failure
from turboserve.cli.progress import progress
from turboserve.wording import counted

app = typer.Typer(help="Measure this machine, or replay traces.", no_args_is_help=True)


class Decoder(StrEnum):
    """Public decoders of Wan's latents."""

    WAN = "wan"
    TAEHV = "taehv"


@app.callback()
def profile() -> None:
    """Measure this machine, or replay traces."""


@app.command()
def engine(
    out: Annotated[Path, typer.Option(help="File to write, for TURBOSERVE_PROFILE.")],
    batch: Annotated[int, typer.Option(min=1, max=64, help="Largest batch size.")] = 8,
    repeats: Annotated[
        int, typer.Option(min=3, help="Number of runs per size; the result is their median.")
    ] = 7,
    model: Annotated[str | None, typer.Option(help="Preset; the default is TURBOSERVE_MODEL.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="JSON file with a model's sizes, which is measured with random weights."),
    ] = None,
    random: Annotated[
        bool, typer.Option(help="Use random weights instead of the configured model's files.")
    ] = False,
    decoder: Annotated[
        Decoder, typer.Option(help="Public decoder to measure if the weights are random.")
    ] = Decoder.WAN,
) -> None:
    """Measure the latency of the engine's stages by batch size.

    Model, device and attention are those of a worker with these TURBOSERVE_… variables. With --config, the
    sizes are those of the file, and the weights are random.
    """
    # Torch takes seconds to import.
    from turboserve.bench.engine.configured import ModelUnavailableError, profile_configured
    from turboserve.worker.model.presets import UnknownPresetError, known
    from turboserve.worker.settings import Settings

    try:
        chosen: dict[str, Any] = {} if model is None else {"model": known(model)}
        with progress("measuring the engine's stages"):
            found = profile_configured(Settings(**chosen), config, random, decoder.value, batch, repeats)
    except (ModelUnavailableError, UnknownPresetError) as error:
        raise failure(str(error)) from None
    try:
        found.write(out)
    except OSError as error:
        raise failure(f"--out: {out} could not be written: {error}") from None
    for stage, seconds in found.stages.items():
        times = ", ".join(f"{size}: {1000 * value:.3g} ms" for size, value in seconds.items())
        typer.echo(f"{stage}: {times}")


@app.command()
def fidelity(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    prompts: Annotated[
        int, typer.Option(min=1, help="Number of prompts that each quality is measured on.")
    ] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of prompts and of the noise.")] = 0,
    steps: Annotated[
        list[int] | None, typer.Option(help="Number of denoising steps; may be repeated. The default is all.")
    ] = None,
    sparsity: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of key blocks that attention skips; may be repeated. The default is 0, 0.6 and 0.8."
        ),
    ] = None,
    quality: Annotated[
        Path | None,
        typer.Option(help="JSON file with the quality of each configuration, for a model without a judge."),
    ] = None,
) -> None:
    """Measure latency and quality of the configurations in which the model can generate a chunk.

    Model and device are those of a worker with these TURBOSERVE_… variables. The quality of a model that
    ships is its judge's score over held-out prompts. For other models --quality states it.
    """
    # Torch takes seconds to import.
    from turboserve.experiments.fidelity.profile import SPARSITIES, UnmeasurableError, profile_models
    from turboserve.worker.engine.errors import AttentionUnavailableError, InvalidFidelityError
    from turboserve.worker.model.presets import SHIPPED
    from turboserve.worker.service.models import load_models
    from turboserve.worker.settings import Settings

    settings = Settings()
    try:
        with progress("measuring the configurations"):
            found = profile_models(
                load_models(settings),
                settings.model in SHIPPED,
                prompts=prompts,
                seed=seed,
                steps=steps or (),
                sparsities=sparsity or SPARSITIES,
                quality_file=quality,
                say=typer.echo,
                attention=settings.attention,
            )
    except (UnmeasurableError, InvalidFidelityError, AttentionUnavailableError) as error:
        raise failure(str(error)) from None
    try:
        found.write(out)
    except OSError as error:
        raise failure(f"--out: {out} could not be written: {error}") from None
    typer.echo(f"floor {found.floor:.3f}; not dominated, fastest first:")
    for each in found.frontier:
        low, high = each.interval
        typer.echo(
            f"  {each.fidelity.label}: {1000 * each.seconds:.1f} ms, "
            f"quality {each.quality:.3f} ({low:.3f} to {high:.3f})"
        )


@app.command()
def autoscaler(
    out: Annotated[Path, typer.Option(help="JSON file to write the table to.")],
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="CSV with time_s,session,event; may be repeated. The default is the family of Appendix A."
        ),
    ] = None,
    levels: Annotated[int, typer.Option(min=1, max=64, help="Number of volatility levels.")] = 5,
    segment: Annotated[float, typer.Option(min=1, help="Length of a segment, in seconds.")] = 60.0,
    capacity: Annotated[
        int, typer.Option(min=1, max=64, help="Maximum number of sessions on one worker.")
    ] = 5,
    most: Annotated[int, typer.Option(min=1, help="Maximum number of workers.")] = 16,
    start_up: Annotated[float, typer.Option(min=0, help="Start-up time of a worker, in seconds.")] = 10.0,
    lone_chunk: Annotated[
        float, typer.Option(min=0.001, help="Time of a chunk on a worker with one session, L(1), in seconds.")
    ] = 0.1336,
    latency_target: Annotated[
        float, typer.Option(min=0.001, help="Maximum time of a chunk, in seconds.")
    ] = 0.67,
    keep_target: Annotated[
        bool, typer.Option(help="Lower the table until no session is late in a replay of the traces.")
    ] = False,
) -> None:
    """Find the autoscaler's parameters for every level of volatility.

    The traces are cut into segments. Each level's segments are replayed with the real placement and control
    cores over a grid of parameters.
    """
    from turboserve.contracts.errors import TurboServeError
    from turboserve.experiments.autoscale.tables import profile_traces

    try:
        with progress("replaying the traces"):
            table = profile_traces(
                trace or [],
                levels,
                segment,
                capacity,
                most,
                start_up,
                lone_chunk,
                latency_target,
                keep_target,
                typer.echo,
            )
        out.write_bytes(table.to_file() + b"\n")
    except TurboServeError as error:
        limit = f" (limit {error.limit})" if error.limit else ""
        raise failure(f"{error.field}: {error.detail}{limit}") from None
    except OSError as error:
        raise failure(f"--out: {out} could not be written: {error}") from None
    for row in table.levels:
        ahead = ", forecast" if row.predictive else ""
        passed = (
            ""
            if row.pass_rate is None
            else f", {row.pass_rate:.0%} of {counted(row.segments, 'segment')} pass"
        )
        upper = "∞" if row.volatility_to is None else f"{row.volatility_to:.2f}"
        typer.echo(
            f"level {row.level}, volatility {row.volatility_from:.2f} to {upper}: "
            f"ρ̂ {row.target_utilization:g}, λ {row.latency_weight:g}{ahead}{passed}"
        )
    found = table.provenance
    typer.echo(f"the whole table on the same traces: {found.late} of {found.activations} late")
