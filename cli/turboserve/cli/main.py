"""The root of the `turboserve` command. Each command imports its heavy dependencies itself."""

from __future__ import annotations

import typer

from turboserve.cli import keys, model, profile
from turboserve.cli.bench import bench
from turboserve.cli.generate import generate
from turboserve.cli.reference import reference
from turboserve.cli.settings import settings
from turboserve.cli.up import status, up

app = typer.Typer(
    name="turboserve",
    help="Serve streaming video generation.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(up)
app.command()(status)
app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)(bench)
app.command()(generate)
app.command()(settings)
app.command()(reference)
app.add_typer(keys.app, name="keys")
app.add_typer(model.app, name="model")
app.add_typer(profile.app, name="profile")

if __name__ == "__main__":
    app()
