"""`turboserve model`: check whether this engine reproduces a reference, and whether it can run a model."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from turboserve.cli.errors import failure
from turboserve.cli.progress import progress

app = typer.Typer(help="Check models.", no_args_is_help=True)


class Dtype(StrEnum):
    """Data type of the computation."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.callback()
def model() -> None:
    """Check models."""


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(help="Reference file: weights, noise, prompts and expected latents.")
    ],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest absolute error of a latent that still passes.")
    ] = 1e-4,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Data type of the computation.")] = Dtype.FLOAT32,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file, as one JSON object.")
    ] = None,
) -> None:
    """Generate a reference's chunks with this engine and compare. Exits with 1 beyond the tolerance."""
    if not file.is_file():
        raise failure(f"FILE: {file} does not exist")
    # Torch takes seconds to import.
    import torch
    from safetensors import SafetensorError

    from turboserve.bench import report
    from turboserve.worker.engine.golden import check_file

    try:
        with progress(f"generating the chunks of {file.name}"):
            result = check_file(file, tolerance, device, getattr(torch, dtype.value))
    except AssertionError as error:
        # Torch raises this if it was built without support for the device.
        raise failure(f"--device: {device}: {error}") from None
    except (ValueError, RuntimeError, SafetensorError) as error:
        raise failure(f"{file}: {error}") from None
    found = {
        "file": file.name,
        "passed": result.passed,
        "max_abs_error": _finite(result.max_abs_error),
        "tolerance": result.tolerance,
        "per_chunk": [_finite(off) for off in result.per_chunk],
        "device": device,
        "dtype": dtype.value,
    }
    for index, off in enumerate(result.per_chunk):
        typer.echo(f"chunk {index}: largest error {off:.2e}")
    verdict = "passed" if result.passed else "FAILED"
    typer.echo(f"{verdict}: largest error {result.max_abs_error:.2e}, tolerance {tolerance:.2e}")
    if json_file is not None:
        try:
            report.write(json_file, found)
        except report.BenchError as error:
            raise failure(str(error)) from None
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def contract(
    name: Annotated[str, typer.Argument(help="Model, as in TURBOSERVE_MODEL.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file, as one JSON object.")
    ] = None,
) -> None:
    """Check everything on which the engine relies in a model. Exits with 1 if a check fails.

    Device and files are those of a worker with these TURBOSERVE_… variables.
    """
    from pydantic import ValidationError

    from turboserve.bench import report
    from turboserve.plugins import PluginLoadError
    from turboserve.worker.replicas.contract import ModelContract, ModelContractError
    from turboserve.worker.service.models import load_models
    from turboserve.worker.settings import Settings

    try:
        settings = Settings(model=name)
    except ValidationError as error:
        raise failure(f"NAME: {error.errors()[0]['msg']}") from None
    checked = ModelContract(lambda: load_models(settings))
    failed: dict[str, str] = {}
    for check_name in ModelContract.CHECKS:
        try:
            with progress(f"checking {check_name}"):
                checked.run(check_name)
        except ModelContractError as error:
            failed[check_name] = error.reason
        except PluginLoadError as error:
            raise failure(f"{name}: {error}") from None
        except Exception as error:  # The model is code of another distribution.
            failed[check_name] = repr(error)
        typer.echo(f"{check_name}: {failed.get(check_name, 'passed')}")
    if json_file is not None:
        found = {
            "model": name,
            "passed": not failed,
            "checks": {each: failed.get(each) for each in ModelContract.CHECKS},
        }
        try:
            report.write(json_file, found)
        except report.BenchError as error:
            raise failure(str(error)) from None
    raise typer.Exit(1 if failed else 0)


def _finite(value: float) -> float | None:
    """Replace infinity by None, since JSON has no infinity. Infinity stands for a latent that is NaN."""
    return value if math.isfinite(value) else None
