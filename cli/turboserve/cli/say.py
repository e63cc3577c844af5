"""How commands speak to a person."""

from __future__ import annotations

import typer


def failure(message: str) -> typer.Exit:
    """Say what is wrong on stderr; raise the result to exit with status 1."""
    typer.secho(f"turboserve: {message}", err=True, fg="red")
    return typer.Exit(1)
