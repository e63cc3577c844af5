"""The option `--size WIDTHxHEIGHT`."""

from __future__ import annotations

from typing import Annotated

import typer

from turboserve.cli.errors import failure

Size = Annotated[
    str | None,
    typer.Option(
        "--size", metavar="WIDTHxHEIGHT", help="Size of a frame, pixels. The default is the model's default."
    ),
]


def sides(size: str | None) -> tuple[int, int] | tuple[None, None]:
    """Return width and height. None, None: the option is not given. Raises the failure of the command."""
    if size is None:
        return None, None
    width, x, height = size.partition("x")
    if not (x and width.isdecimal() and height.isdecimal()):
        raise failure(f"--size: {size!r} is not WIDTHxHEIGHT, such as 128x128")
    return int(width), int(height)
