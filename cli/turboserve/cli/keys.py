"""`turboserve keys`: the file of hashed API keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from turboserve.cli.errors import failure

FILE = typer.Option("--file", envvar="TURBOSERVE_API_KEYS_FILE", help="The file of hashed keys.")

app = typer.Typer(
    help="Create, list and revoke the API keys in the file that TURBOSERVE_API_KEYS_FILE names.",
    no_args_is_help=True,
)


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Tenant of the key. Sessions belong to a tenant.")],
    file: Annotated[Path, FILE],
    operator: Annotated[
        bool,
        typer.Option("--operator", help="The key may also resize the pool and migrate any session."),
    ] = False,
) -> None:
    """Make a key. The key is printed once, on stdout. The file keeps only its hash."""
    from turboserve.gateway.auth import key_file

    try:
        record, key = key_file.add(file, tenant, operator=operator)
    except ValidationError:
        raise failure("TENANT: 1 to 64 letters, digits, '_' or '-'") from None
    except key_file.KeyFileError as error:
        raise failure(str(error)) from None
    kind = "operator's key" if operator else "key"
    typer.echo(f"{kind} {record.id} of {tenant}, in {file}; it is shown only once:", err=True)
    typer.echo(key)


@app.command(name="list")
def list_keys(file: Annotated[Path, FILE]) -> None:
    """List the ids, tenants and creation times of all keys. The keys themselves are not stored."""
    from rich.console import Console
    from rich.table import Table

    from turboserve.gateway.auth import key_file

    try:
        found = key_file.read(file)
    except key_file.KeyFileError as error:
        raise failure(str(error)) from None
    table = Table("id", "tenant", "operator", "created")
    for key in found.keys:
        made = "–" if key.created_at is None else f"{key.created_at:%Y-%m-%d %H:%M} UTC"
        table.add_row(key.id, key.tenant, "yes" if key.operator else "no", made)
    Console().print(table)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Key id, as in `turboserve keys list`.")],
    file: Annotated[Path, FILE],
) -> None:
    """Remove a key. Within two seconds, running gateways refuse the key and end the streams it has opened."""
    from turboserve.gateway.auth import key_file

    try:
        removed = key_file.revoke(file, key_id)
    except key_file.KeyFileError as error:
        raise failure(str(error)) from None
    typer.echo(f"revoked {removed.id} of {removed.tenant}")
