"""The root of the `turboserve` command. Each command imports its heavy dependencies itself."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Annotated

import typer

from turboserve.cli import keys, model, profile, session, trace, webhooks
from turboserve.cli.audit import audit
from turboserve.cli.bench import bench
from turboserve.cli.down import down
from turboserve.cli.generate import generate
from turboserve.cli.logs import logs
from turboserve.cli.reference import reference
from turboserve.cli.settings import settings
from turboserve.cli.up import status, up
from turboserve.cli.usage import usage

app = typer.Typer(
    name="turboserve",
    help="Serve streaming video generation.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"turboserve {version_of('turboserve-cli')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Accept the options of the command itself."""


app.command()(up)
app.command()(status)
app.command()(down)
app.command()(logs)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)(bench)
app.command()(generate)
app.command()(audit)
app.command()(usage)
app.command()(settings)
app.command()(reference)
app.add_typer(keys.app, name="keys")
app.add_typer(model.app, name="model")
app.add_typer(profile.app, name="profile")
app.add_typer(session.app, name="session")
app.add_typer(trace.app, name="trace")
app.add_typer(webhooks.app, name="webhooks")

if __name__ == "__main__":
    app()
