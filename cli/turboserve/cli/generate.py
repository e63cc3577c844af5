"""`turboserve generate PROMPT -o clip.mp4`: generate a clip with the included model, without a stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from turboserve.cli.errors import failure
from turboserve.cli.progress import progress

LONGEST_PROMPT = 2_000
LONGEST_S = 600.0


def generate(
    prompt: Annotated[str, typer.Argument(help='Prompt, e.g. "a red circle moving left".')],
    output: Annotated[Path, typer.Option("--output", "-o", help="MP4 file to write.")],
    then: Annotated[
        list[str] | None,
        typer.Option(help="Prompt to switch to; may be repeated. All prompts get equal time."),
    ] = None,
    switch: Annotated[
        list[str] | None,
        typer.Option(metavar="T:PROMPT", help="Switch to this prompt at second T; may be repeated."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, help="Length of the clip, in seconds.")
    ] = 6.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the noise. The same seed gives the same clip.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda, cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Generate a clip and write it as MP4."""
    if then and switch:
        raise failure("--then, --switch: use one or the other")
    turns = sorted((_turn(text) for text in switch or ()), key=lambda turn: turn[0])
    starts = [0.0, *(at_s for at_s, _ in turns)] if turns else None
    prompts = [text.strip() for text in (prompt, *(then or ()), *(text for _, text in turns))]
    for text in prompts:
        if not 1 <= len(text) <= LONGEST_PROMPT:
            raise failure(f"PROMPT: has {len(text)} characters; 1 to {LONGEST_PROMPT} are possible")
    if not output.parent.is_dir():
        raise failure(f"--output: the directory {output.parent} does not exist")
    # Torch takes seconds to import.
    with progress("loading"):
        import torch

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            # Some messages go on for pages.
            reason = str(error).splitlines()[0].split(". ")[0]
            raise failure(f"--device: {device} is not available: {reason}") from None
    from turboserve.cli.clip import GenerationError, fragments
    from turboserve.worker.model.load import CheckpointError, UnreadableCheckpointError
    from turboserve.worker.replicas.toyworld import load_toyworld

    # Write to a temporary file first, so that a failure leaves no partial clip.
    unfinished = output.with_name(f".{output.name}.part")
    try:
        with unfinished.open("wb") as file, progress("generating", 1.0) as advance:
            for part in fragments(
                load_toyworld(device),
                prompts,
                seconds,
                seed,
                starts,
                lambda done, total: advance(done / total),
            ):
                file.write(part)
        unfinished.replace(output)
    except (GenerationError, CheckpointError, UnreadableCheckpointError, RuntimeError, OSError) as error:
        raise failure(str(error)) from None
    finally:
        unfinished.unlink(missing_ok=True)
    size = output.stat().st_size
    written = {"file": str(output), "bytes": size}
    typer.echo(json.dumps(written) if as_json else f"{output}: {size:,} bytes")


def _turn(text: str) -> tuple[float, str]:
    """Parse `T:PROMPT` into (second, prompt)."""
    at, colon, prompt = text.partition(":")
    try:
        seconds = float(at)
    except ValueError:
        seconds = -1.0
    if not colon or not 0 <= seconds <= LONGEST_S:
        raise failure(f"--switch: {text!r} is not T:PROMPT with T from 0 to {LONGEST_S:g} seconds")
    return seconds, prompt
