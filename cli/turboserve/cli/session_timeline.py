"""`turboserve session timeline`: how a chunk came about."""

from __future__ import annotations

from typing import Annotated

import typer

from turboserve.cli.session_client import STACK, AsJson, Data, Key, SessionId, Url, connected, json_text


def timeline(
    session: SessionId,
    chunk: Annotated[int, typer.Option(min=0, help="Index of the chunk.")] = 0,
    url: Url = None,
    data: Data = STACK,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Print how a chunk came about, from the request to the screen, with the time of each step."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    with connected(url, data, key) as client:
        found = client.session(session).chunk(chunk)
    if as_json:
        typer.echo(json_text(found))
        return
    of = f"chunk {found.index} of {found.session}: epoch {found.epoch}, prompt {found.control_seq}"
    typer.echo(f"{of}, {found.bytes} bytes, {found.total_s:.3f} s in all")
    if found.decision is not None:
        numbers = " ".join(f"{name}={value:g}" for name, value in found.decision.numbers.items())
        typer.echo(f"{found.decision.kind}: {found.decision.reason} {numbers}".rstrip())
    first = found.hops[0].at
    table = Table(
        "step", Column("after, s", justify="right"), Column("step, ms", justify="right"), "clock of"
    )
    for hop in found.hops:
        step = "" if hop.since_s is None else f"{round(1000 * hop.since_s, 1) + 0.0:.1f}"
        table.add_row(hop.name, f"{(hop.at - first).total_seconds():.3f}", step, escape(hop.by))
    Console().print(table)
