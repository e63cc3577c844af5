"""`turboserve audit`: who changed keys, links, pools, costs and owners of sessions."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from turboserve.cli.errors import failure
from turboserve.cli.gateway_request import Url, listed
from turboserve.cli.keys import AsJson, Key

FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]
COLUMNS = ("at", "operation", "target", "tenant", "key", "address", "result", "change")


def audit(
    url: Url,
    key: Key = None,
    tenant: Annotated[str | None, typer.Option(help="Only of senders of this tenant.")] = None,
    of_key: Annotated[
        str | None, typer.Option("--of-key", metavar="ID", help="Only of the key with this id.")
    ] = None,
    operation: Annotated[
        str | None, typer.Option(help="Only this operation, as the OpenAPI names it: create_key.")
    ] = None,
    refused: Annotated[
        bool | None, typer.Option("--refused/--accepted", help="Only refused, or only accepted ones.")
    ] = None,
    since: Annotated[
        datetime | None, typer.Option(formats=FORMATS, help="Only from this time on, in UTC.")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(formats=FORMATS, help="Only before this time, in UTC.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of entries.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Print the audit log, newest first. Needs a key with the scope admin."""
    from turboserve.client import TurboServeError

    query: dict[str, Any] = {
        "tenant": tenant,
        "key": of_key,
        "operation": operation,
        "refused": None if refused is None else str(refused).lower(),
        "since": None if since is None else since.replace(tzinfo=UTC).isoformat(),
        "until": None if until is None else until.replace(tzinfo=UTC).isoformat(),
    }
    given = {name: value for name, value in query.items() if value is not None}
    try:
        found, _ = listed(url, key, "/v1/audit", "entries", given, limit)
    except (TurboServeError, OSError) as error:
        raise failure(str(error)) from None
    if as_json:
        for entry in found:
            typer.echo(json.dumps(entry))
        return
    _print(found)


def _print(entries: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*COLUMNS)
    for entry in entries:
        cells = (
            f"{datetime.fromisoformat(entry['at']):%Y-%m-%d %H:%M:%S}",
            entry["operation"],
            entry["target"],
            entry["tenant"],
            entry["key"] or "–",
            entry["address"],
            entry["code"] or str(entry["status"]),
            entry["change"],
        )
        table.add_row(*map(escape, cells))
    Console().print(table)
