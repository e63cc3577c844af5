"""Error messages of commands."""

from __future__ import annotations

import typer


def failure(message: str) -> typer.Exit:
    """Print an error to stderr. Raise the result to exit with status 1."""
    typer.secho(f"turboserve: {message}", err=True, fg="red")
    return typer.Exit(1)
